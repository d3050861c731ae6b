"""The target's hidden states as a head reads them, and the folder of a trained speculator.

Features lie side by side and are brought to one scale. The saved head has that scale in `fc`.
Legend: B rows, N tokens a row, n features, H width.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.speculators.target import Reading


def scales_of(reading: Reading) -> list[float]:
    """A scale for each feature, from a batch. It is the median row's, since a text's first row may
    be a hundred times as large as others."""
    sizes = [f.float().square().mean(-1).sqrt().median() for f in reading.features]
    return [1 / float(size) for size in sizes]


def side_by_side(reading: Reading, scales: Sequence[float]) -> Tensor:
    """The scaled features, [B, N, n * H]."""
    return torch.cat([f * s for f, s in zip(reading.features, scales, strict=True)], -1)


def folded(weight: Tensor, scales: Sequence[float]) -> Tensor:
    """A weight [..., n * H] that takes features at their own scale."""
    width = weight.shape[-1] // len(scales)
    return weight * torch.tensor(scales, device=weight.device).repeat_interleave(width)


def usual(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs a head reads: an early, a middle and the last one."""
    last = num_layers - 1
    return tuple(sorted({min(2, last), num_layers // 2, last}))


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write a speculator: its numbers in bf16, its ids unchanged, and its config."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        n: (t.bfloat16() if t.is_floating_point() else t).detach().cpu().contiguous()
        for n, t in tensors.items()
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
