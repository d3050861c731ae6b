"""The decoder layers of a head, `layers.{i}.*` and `norm`: made from transformers' classes, then
converted to fused layers."""

from collections.abc import Mapping
from typing import Any

import torch
from specdec_kernels import ops
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from specdec_cli.models.fused_layer import Family, FusedLayer
from specdec_cli.models.rotary_tables import table_of

CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_LAYERS = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}


def layers_of(config: Any, widths: list[int]) -> nn.ModuleDict:
    """Make a head's layers and their final norm on meta. widths: the input width of each layer's
    QKV projection."""
    layers = nn.ModuleList()
    with torch.device("meta"):
        for index, width in enumerate(widths):
            layer = _LAYERS[config.model_type](config, index)
            attention = layer.self_attn
            for product in (attention.q_proj, attention.k_proj, attention.v_proj):
                product.in_features = width
                product.weight = nn.Parameter(torch.empty(product.out_features, width))
            layers.append(layer)
        norm = type(layer.input_layernorm)(config.hidden_size, config.rms_norm_eps)
    return nn.ModuleDict({"layers": layers, "norm": norm}).requires_grad_(False)


def fused_layers(
    body: nn.ModuleDict,
    config: Any,
    windows: tuple[int, ...],
    tensors: Mapping[str, Tensor],
    causal: bool = True,
) -> list[FusedLayer]:
    """Return the fused form of `body`, a result of `layers_of`, with weights from `tensors`.
    windows: the sliding window of each layer; 0 for none. causal: see `ops.AttentionCall`."""
    body.load_state_dict({name: tensors[name] for name in body.state_dict()}, assign=True)
    layers: Any = body["layers"]
    following = [*(layer.input_layernorm for layer in layers[1:]), body["norm"]]
    scale, found = config.head_dim**-0.5, []
    for index, (layer, window) in enumerate(zip(layers, windows, strict=True)):
        call = ops.AttentionCall(scale, window, causal=causal)
        place = index, 0, call, following[index]
        found.append(FusedLayer.of_layer(layer, config, Family(), *place))
    return found


def rotary_table(
    config: Any, dtype: torch.dtype, device: torch.device, max_len: int
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the layers' rotary embedding. Each is [max_len, D], where D
    is the head dimension."""
    return table_of(LlamaRotaryEmbedding(config).to(device), (), dtype, device, max_len)
