"""The experts that tokens chose, in forms for kernels with fixed grids. A slot is an entry in the
list of chosen experts. Only the device knows how many slots are in use."""

from typing import NamedTuple

from torch import Tensor

FEW_TOKENS = 16  # maximum tokens of a plan; there are tiles for up to this many


def are_few(num_rows: int, num_chosen: int, num_experts: int) -> bool:
    """Return whether a plan is best for T = `num_rows` tokens, because many experts get none."""
    return 0 < num_rows <= FEW_TOKENS and num_rows * num_chosen < num_experts


class ExpertPlan(NamedTuple):
    """The chosen experts in ascending order, in P = min(E, T * C) slots. Some slots are unused."""

    used: Tensor
    """[1] int32, the number of slots in use. The fields below are undefined in unused slots."""
    experts: Tensor
    """[P] int32, the index of each slot's expert."""
    chosen: Tensor
    """[P] int64; bit t is set if token t chose the expert."""
    weights: Tensor
    """[P, T] fp32, routing weights; 0 for tokens that did not choose the expert."""
    factors: Tensor | None
    """[T] fp32, by which the matmul's results for each token are multiplied, because its input is
    not normalised yet; None if it is."""


class PairGroups(NamedTuple):
    """All pairs of a token and one of its experts, grouped by expert. Pair t * C + c belongs to
    token t and to the c-th of its experts in ascending order."""

    sizes: Tensor
    """[E] int32, the number of pairs per expert."""
    pairs: Tensor
    """[E, T] int32, each expert's pairs in any order. Entries after the last pair are undefined."""
    weights: Tensor
    """[T, C] fp32, the routing weight of each pair."""
    factors: Tensor | None
    """As in `ExpertPlan`."""
