"""Store a model's or a speculator's matrices in 8 or 4 bits, in the format of compressed-tensors.

    python -m scripts.speculators.store MODEL OUT [--form fp8 | int4 | plain]

MODEL is a folder, a GGUF file, or another name that recipes know. Its quantised matrices are made
plain first. `fp8` is e4m3 with a scale for each row, `int4` has symmetric groups of 32 columns,
each with the scale of least squared error, and `plain` stays in bf16. Small heads (of confidence,
Markov's tables), embeddings and norms stay in bf16 in every form.
"""

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from specdec_kernels.linear.stored import FP8, Storage
from torch import Tensor

from scripts.speculators import commands
from specdec_cli.models.description import describe
from specdec_cli.models.gguf.files import read_model
from specdec_cli.models.gguf.header import is_gguf
from specdec_cli.models.gguf.tokenizer import gguf_tokenizer
from specdec_cli.models.loader import load
from specdec_cli.models.quantised import dequantised
from specdec_cli.models.resolve import model_place
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.weights import open_checkpoint

WEIGHTS, CONFIG = "model.safetensors", "config.json"
FORMS = ("fp8", "int4", "plain")
GROUP = 32  # columns of int4 that share a scale
SHARES = 17  # scales to try for each group, from 0.6 of the largest number's scale up to that scale
TEXTS = re.compile(r"(tokenizer|vocab|merges|special_tokens|chat_template|generation_config).*")
# Embeddings of several families (`embed_out` is GPT-NeoX's head), heads and small heads.
PLAIN = re.compile(r"embed|\bw[tp]e\b|lm_head|markov|confidence")
# The format's own scales are in the dtype of the model.
STORAGE = Storage(FP8, scales=torch.bfloat16)
Tensors = dict[str, Tensor]


def plain_tensors(place: Path) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of a model in bf16, and its config without a quantisation."""
    if is_gguf(place):
        spec = ModelSpec("target", str(place), None, "bfloat16", "auto", weights="dequantise")
        module = load(describe(spec, torch.device("cpu")), torch.device("cpu"))
        tied = module._tied_weights_keys if module.config.tie_word_embeddings else ()
        tensors = {n: t for n, t in module.state_dict().items() if n not in tied}
        # Servers choose their own class by this name, which no GGUF file has.
        return tensors, module.config.to_dict() | {"architectures": [type(module).__name__]}
    config = json.loads((place / CONFIG).read_text())
    settings = config.pop("quantization_config", None)
    with open_checkpoint(place, False) as readers:
        if settings is not None:
            readers = dequantised(readers, settings, torch.bfloat16, str(place))
        return {name: read().clone() for name, read in readers.items()}, config


def in_fp8(matrix: Tensor) -> Tensors:
    stored = STORAGE.quantised(matrix)
    return {"weight": stored.codes, "weight_scale": stored.scales}


def in_int4(matrix: Tensor) -> Tensors:
    """Codes of 8 + number, eight in a word of 32 bits with the first in its lowest ones."""
    groups = matrix.unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    least = torch.full_like(most, float("inf"))
    scales, codes = torch.zeros_like(most), torch.zeros_like(groups)
    for share in torch.linspace(0.6, 1.0, SHARES).tolist():
        scale = (most * (share / 7)).bfloat16().float()
        numbers = (groups / scale).round().clamp(-8, 7)
        error = (numbers * scale - groups).square().sum(-1, keepdim=True)
        is_less = error < least
        least, scales = least.minimum(error), torch.where(is_less, scale, scales)
        codes = torch.where(is_less, numbers, codes)
    nibbles = (codes.flatten(-2).to(torch.int64) + 8).unflatten(-1, (-1, 8))
    words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    return {
        "weight_packed": torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32),
        "weight_scale": scales[..., 0].bfloat16(),
        "weight_shape": torch.tensor(matrix.shape),
    }


def stored_as(form: str, tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Tensors with matrices in a form other than `plain`, and the config's `quantization_config`.

    Raises `ValueError` for a matrix whose columns do not divide into groups.
    """
    found, plain = dict(tensors), {"lm_head"}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not name.endswith(".weight"):
            continue
        path = name.removesuffix(".weight")
        if PLAIN.search(name):
            plain.add(path)
            continue
        if form == "int4" and tensor.shape[1] % GROUP:
            raise ValueError(f"{name} has {tensor.shape[1]} columns, no whole groups of {GROUP}")
        parts = (in_fp8 if form == "fp8" else in_int4)(found.pop(name).float())
        found |= {f"{path}.{leaf}": part for leaf, part in parts.items()}
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}
    if form == "int4":
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    weights |= {"symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return found, {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if form == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(plain),
    }


def write(target: Path, form: str, tensors: Tensors, config: dict[str, Any]) -> None:
    """Write plain weights in a form, with their config, to `target`."""
    assert "quantization_config" not in config
    if form != "plain":
        tensors, settings = stored_as(form, tensors)
        config = config | {"quantization_config": settings}
    target.mkdir(parents=True, exist_ok=True)
    found = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(found, target / WEIGHTS, metadata={"format": "pt"})
    (target / CONFIG).write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=commands.Help
    )
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--form", choices=FORMS, default=FORMS[0])
    args = parser.parse_args()
    place = model_place(args.model, None)
    if args.out.resolve() == place.resolve():
        raise ValueError(f"{args.out} holds the model: name another folder to write to")
    write(args.out, args.form, *plain_tensors(place))
    if is_gguf(place):
        gguf_tokenizer(read_model(place)).save_pretrained(args.out)
        return
    for file in place.iterdir():
        if TEXTS.fullmatch(file.name):
            shutil.copy(file, args.out)


if __name__ == "__main__":
    commands.run(main)
