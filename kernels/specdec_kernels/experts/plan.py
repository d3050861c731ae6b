"""Experts that a few tokens chose, in a form that kernels of fixed grids read.

A slot is a place in the list of chosen experts. Which slots are in use only the device knows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.experts.reference import Experts

FEW_TOKENS = 64  # a slot's tokens are the bits of one number


class Plan(NamedTuple):
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


def empty_plan(num_rows: int, experts: Experts, scaled: bool, device: torch.device) -> Plan:
    """Uninitialised tensors of a plan for T = `num_rows` tokens; scaled: with factors."""
    assert 0 < num_rows <= FEW_TOKENS
    slots = min(experts.num_experts, num_rows * experts.routing.num_chosen)

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    return Plan(
        used=empty(1) if experts.read is None else experts.read,
        experts=empty(slots),
        chosen=empty(slots, dtype=torch.int64),
        weights=empty(slots, num_rows, dtype=torch.float32),
        factors=empty(num_rows, dtype=torch.float32) if scaled else None,
    )
