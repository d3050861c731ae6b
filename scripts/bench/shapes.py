"""Shapes of the models whose kernels and passes are timed, and forms of their weights."""

from dataclasses import dataclass

import torch
from specdec_kernels.linear.stored import Storage


@dataclass(frozen=True)
class Model:
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int = 128256


MODELS = {
    "1b": Model(2048, 8192, 16, 32, 8, 64),
    "8b": Model(4096, 14336, 32, 32, 8, 128),
    "70b": Model(8192, 28672, 80, 64, 8, 128),
    # Other models, without the norms of heads and the norms before sums that some have.
    "llama-3.2-3b": Model(3072, 8192, 28, 24, 8, 128),
    "qwen2.5-0.5b": Model(896, 4864, 24, 14, 2, 64, 151936),
    "smollm2-135m": Model(576, 1536, 30, 9, 3, 64, 49152),
    "smollm2-360m": Model(960, 2560, 32, 15, 5, 64, 49152),
    "smollm2-1.7b": Model(2048, 8192, 24, 32, 32, 64, 49152),
    "qwen2.5-1.5b": Model(1536, 8960, 28, 12, 2, 128, 151936),
    "qwen3-0.6b": Model(1024, 3072, 28, 16, 8, 128, 151936),
    "qwen3-1.7b": Model(2048, 6144, 28, 16, 8, 128, 151936),
    "qwen3-4b": Model(2560, 9728, 36, 32, 8, 128, 151936),
    "qwen2.5-3b": Model(2048, 11008, 36, 16, 2, 128, 151936),
    "qwen2.5-7b": Model(3584, 18944, 28, 28, 4, 128, 152064),
    "qwen2.5-14b": Model(5120, 13824, 48, 40, 8, 128, 152064),
    "qwen3-8b": Model(4096, 12288, 36, 32, 8, 128, 151936),
    "gemma-3-270m": Model(640, 2048, 18, 4, 1, 256, 262144),
    "gemma-2-2b": Model(2304, 9216, 26, 8, 4, 256, 256000),
    "gemma-2-9b": Model(3584, 14336, 42, 16, 8, 256, 256000),
    "gemma-3-1b": Model(1152, 6912, 26, 4, 1, 256, 262144),
}
STORAGES = {
    "fp8": Storage("fp8"),
    "fp8-blocks": Storage("fp8", (128, 128)),
    "int8": Storage("int8"),
    "int4": Storage("int4", (1, 128), scales=torch.bfloat16),
    "int4-32": Storage("int4", (1, 32), scales=torch.float16),
    "int4-minima": Storage("int4", (1, 32), scales=torch.float16, has_minima=True),
    "int8-16": Storage("int8", (1, 16), scales=torch.float16),
    "mxfp4": Storage("mxfp4", (1, 32), scales=torch.uint8),
}
