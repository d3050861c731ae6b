"""The routers' results, as data structures that kernels with a fixed grid can read.

The grid must not depend on how many experts the tokens chose, because only the device knows that
number. A slot is an entry in the list of chosen experts, and some slots may be unused.
"""

from typing import NamedTuple

from torch import Tensor

FEW_TOKENS = 16  # maximum number of tokens in a plan; there are no tiles for more


def are_few(num_rows: int, num_chosen: int, num_experts: int) -> bool:
    """Return True if T = `num_rows` tokens should use an `ExpertPlan`: if there are 1 to FEW_TOKENS
    tokens, and they choose fewer experts in total, T * C, than there are."""
    return 0 < num_rows <= FEW_TOKENS and num_rows * num_chosen < num_experts


class ExpertPlan(NamedTuple):
    """The experts that T tokens chose, in ascending order, one per slot.

    There are P = min(E, T * C) slots, because each token chooses C of E experts. An expert has only
    one slot even if several tokens chose it, so the last slots may be unused.
    """

    used: Tensor
    """[1] int32, the number of slots in use. The fields below are undefined in unused slots."""
    experts: Tensor
    """[P] int32, the index of each slot's expert."""
    chosen: Tensor
    """[P] int64; bit t is set if token t chose the expert."""
    weights: Tensor
    """[P, T] fp32, routing weights; 0 for tokens that did not choose the expert."""
    factors: Tensor | None
    """[T] fp32, 1 / RMS of each token, by which gate and up are multiplied if the experts' input is
    not normalised yet. None if it is normalised."""


class PairGroups(NamedTuple):
    """All pairs of a token and one of its experts, grouped by expert. Pair number t * C + c
    consists of token t and the c-th of its experts in ascending order."""

    sizes: Tensor
    """[E] int32, the number of pairs per expert."""
    pairs: Tensor
    """[E, T] int32, the numbers of each expert's pairs, in any order. Entries after an expert's
    last pair are undefined."""
    weights: Tensor
    """[T, C] fp32, the routing weight of each pair."""
    factors: Tensor | None
    """[T] fp32, or None, the same as `ExpertPlan.factors`."""
