"""The tokens' chosen experts, in forms for kernels with fixed grids. A slot is an entry in the list
of experts chosen by a few tokens. The number of slots in use is known only on the device."""

from typing import NamedTuple

from torch import Tensor

FEW_TOKENS = 16  # maximum tokens of a plan; there are tiles for up to this many


def are_few(num_rows: int, num_chosen: int, num_experts: int) -> bool:
    """True if a plan is best for T = `num_rows` tokens, because many experts get no token."""
    return 0 < num_rows <= FEW_TOKENS and num_rows * num_chosen < num_experts


class ExpertPlan(NamedTuple):
    """The chosen experts in ascending order, in P = min(E, T * C) slots. Some slots are unused."""

    used: Tensor
    """[1] int32, the number of slots in use. The fields below are undefined in the others."""
    experts: Tensor
    """[P] int32, the indices of the chosen experts."""
    chosen: Tensor
    """[P] int64, bit t is set if token t chose the expert."""
    weights: Tensor
    """[P, T] fp32, 0 for tokens that did not choose the expert."""
    factors: Tensor | None
    """[T] fp32, the factors of the rows' results; None for normalised rows."""


class PairGroups(NamedTuple):
    """The pairs of a token and one of its experts, by expert. Pair t * C + c belongs to token t,
    whose experts are in ascending order."""

    sizes: Tensor
    """[E] int32, pairs of each expert."""
    pairs: Tensor
    """[E, T] int32, in any order. Places after an expert's last pair are undefined."""
    weights: Tensor
    """[T, C] fp32, the factors of the experts' outputs."""
    factors: Tensor | None
    """As in `ExpertPlan`."""
