"""Store a speculator's matrices in fp8 (e4m3, a scale for each row), as compressed-tensors has it.

    python -m scripts.speculators.store FOLDER OUT

Small heads (of confidence, Markov's tables), embeddings and norms stay in bf16.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from specdec_kernels.linear.stored import FP8, Storage
from torch import Tensor

from scripts.speculators import commands

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PLAIN = re.compile("embed_tokens|lm_head|markov|confidence")
# The format's own scales are in the dtype of the model.
STORAGE = Storage(FP8, scales=torch.bfloat16)


def in_fp8(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file with matrices in fp8, and the config's `quantization_config`."""
    found, plain = dict(tensors), {"lm_head"}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not name.endswith(".weight"):
            continue
        path = name.removesuffix(".weight")
        if PLAIN.search(name):
            plain.add(path)
            continue
        stored = STORAGE.quantised(tensor.float())
        found[name], found[f"{path}.weight_scale"] = stored.codes, stored.scales
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights | {"dynamic": False}}
    return found, {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"input_activations": None}},
        "ignore": sorted(plain),
    }


def store(source: Path, target: Path, config: dict[str, Any]) -> None:
    """Write the weights of `source`, which are plain, and a config to `target`."""
    assert "quantization_config" not in config, f"{source} is quantised already"
    tensors, settings = in_fp8(load_file(source / WEIGHTS))
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(config | {"quantization_config": settings}, indent=1)
    (target / CONFIG).write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=commands.Help
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    store(args.folder, args.out, json.loads((args.folder / CONFIG).read_text()))


if __name__ == "__main__":
    commands.run(main)
