"""The target's hidden states as a head reads them: at one scale, side by side.

The scale is part of `fc` in the saved head. Legend: B rows, N tokens a row, n features, H width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from scripts.speculators.target import Reading


def scales_of(reading: Reading) -> list[float]:
    """A scale for each feature, from a batch: the median row's, since a text's first row may be a
    hundred times as large as others."""
    sizes = [f.float().square().mean(-1).sqrt().median() for f in reading.features]
    return [1 / float(size) for size in sizes]


def side_by_side(reading: Reading, scales: Sequence[float]) -> Tensor:
    """[B, N, n * H]"""
    return torch.cat([f * s for f, s in zip(reading.features, scales, strict=True)], -1)


def folded(weight: Tensor, scales: Sequence[float]) -> Tensor:
    """A weight [..., n * H] for features at their own scale."""
    width = weight.shape[-1] // len(scales)
    return weight * torch.tensor(scales, device=weight.device).repeat_interleave(width)


def usual(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs a head reads: an early, a middle and the last one."""
    last = num_layers - 1
    return tuple(sorted({min(2, last), num_layers // 2, last}))


def stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as a file holds them, in bf16."""
    return {n: t.detach().cpu().bfloat16().contiguous() for n, t in tensors.items()}
