"""Writes random weights of gpt-oss's shapes, so that every engine reads the same ones.

    python scripts/peers/random_gpt_oss.py recipes/shapes/gpt-oss-20b FOLDER

vLLM and SGLang have dummy weights too, but theirs are useless for batches of gpt-oss: values and
biases of a router lie within 0.001 of 0, and so do the norms before it. Then the biases alone
choose the experts, the same 4 for every token, and a batch reads no more experts than one sequence.
Here biases are 0, norms are 1, and tokens choose experts about evenly. Experts are in mxfp4.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

STD = 0.02
SCALE = 120  # exponent plus 127 of a group: with random codes, values have a deviation of STD
GROUP = 32  # columns that share a scale
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # draws the values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", type=Path, help="a folder with gpt-oss's config.json")
    parser.add_argument("folder", type=Path, help="where to write")
    args = parser.parse_args()
    write(args.shapes, args.folder)


def write(shapes: Path, folder: Path) -> None:
    """Write a checkpoint with the config of `shapes` and a file for each layer."""
    config = json.loads((shapes / "config.json").read_text())
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for number, tensors in enumerate(parts(config)):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(shapes / "config.json", folder)


def parts(config: dict[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each file: those of one layer, and last those outside the layers."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    for number in range(config["num_hidden_layers"]):
        yield {f"model.layers.{number}.{name}": t for name, t in layer(config).items()}
    yield {
        "model.embed_tokens.weight": normal(vocab, hidden),
        "model.norm.weight": ones(hidden),
        "lm_head.weight": normal(vocab, hidden),
    }


def layer(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    hidden, width = config["hidden_size"], config["intermediate_size"]
    heads, experts = config["num_attention_heads"], config["num_local_experts"]
    q, kv = (n * config["head_dim"] for n in (heads, config["num_key_value_heads"]))
    found = {
        "input_layernorm.weight": ones(hidden),
        "post_attention_layernorm.weight": ones(hidden),
        "self_attn.sinks": normal(heads),
        "mlp.router.weight": normal(experts, hidden),
        "mlp.router.bias": zeros(experts),
    }
    for name, out, into in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden)):
        found[f"self_attn.{name}_proj.weight"] = normal(out, into)
        found[f"self_attn.{name}_proj.bias"] = zeros(out)
    found["self_attn.o_proj.weight"] = normal(hidden, q)
    found["self_attn.o_proj.bias"] = zeros(hidden)
    for name, out, into in (("gate_up", 2 * width, hidden), ("down", hidden, width)):
        shape, at = (experts, out, into // GROUP), f"mlp.experts.{name}_proj"
        found[f"{at}_blocks"] = codes(*shape, GROUP // 2)
        found[f"{at}_scales"] = torch.full(shape, SCALE, dtype=torch.uint8)
        found[f"{at}_bias"] = zeros(experts, out)
    return found


def normal(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_(0.0, STD).cpu()


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, device=DEVICE).cpu()


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
