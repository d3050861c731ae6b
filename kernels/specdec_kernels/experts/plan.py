"""Experts that tokens chose, in forms that kernels of fixed grids read.

A slot is a place in the list of the experts that a few tokens chose. Which slots are in use only
the device knows. More tokens are grouped by expert.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.experts.reference import Experts

FEW_TOKENS = 16  # that a plan can have; tiles exist for so many


def are_few(num_rows: int, num_chosen: int, num_experts: int) -> bool:
    """Whether a plan serves T = `num_rows` tokens best, since many experts have none of them.

    Otherwise an expert has at least one on average, and the tokens are better grouped.
    """
    return 0 < num_rows <= FEW_TOKENS and num_rows * num_chosen < num_experts


class ExpertPlan(NamedTuple):
    """The chosen experts, in ascending order; P = min(E, T * C) slots, of which some are unused."""

    used: Tensor
    """[1] int32, slots in use. What follows is undefined in the others."""
    experts: Tensor
    """[P] int32."""
    chosen: Tensor
    """[P] int64, bit t is set if token t chose the expert."""
    weights: Tensor
    """[P, T] fp32, 0 for tokens that did not choose the expert."""
    factors: Tensor | None
    """[T] fp32, by which products of rows are multiplied; None for rows that are normed."""


def empty_plan(num_rows: int, experts: Experts, scaled: bool, device: torch.device) -> ExpertPlan:
    """Uninitialised tensors of a plan for T = `num_rows` tokens; scaled: with factors."""
    assert 0 < num_rows <= FEW_TOKENS
    slots = min(experts.num_experts, num_rows * experts.routing.num_chosen)

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    return ExpertPlan(
        used=empty(1) if experts.read is None else experts.read,
        experts=empty(slots),
        chosen=empty(slots, dtype=torch.int64),
        weights=empty(slots, num_rows, dtype=torch.float32),
        factors=empty(num_rows, dtype=torch.float32) if scaled else None,
    )


class PairGroups(NamedTuple):
    """The pairs of a token and one of its experts, by expert. Pair t * C + c is token t's, whose
    experts are in ascending order."""

    sizes: Tensor
    """[E] int32, pairs of each expert."""
    pairs: Tensor
    """[E, T] int32, in any order. What follows an expert's last pair is undefined."""
    weights: Tensor
    """[T, C] fp32."""
    factors: Tensor | None
    """As in `ExpertPlan`."""


def empty_groups(num_rows: int, experts: Experts, scaled: bool, device: torch.device) -> PairGroups:
    """Uninitialised tensors of the groups of T = `num_rows` tokens; scaled: with factors."""

    def empty(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    return PairGroups(
        sizes=empty(experts.num_experts, dtype=torch.int32),
        pairs=empty(experts.num_experts, num_rows, dtype=torch.int32),
        weights=empty(num_rows, experts.routing.num_chosen, dtype=torch.float32),
        factors=empty(num_rows, dtype=torch.float32) if scaled else None,
    )
