"""Greedy choice of a token: torch reference."""

from torch import Tensor


def greedy_argmax_reference(logits: Tensor) -> Tensor:
    """See `ops.greedy_argmax`."""
    top, first = logits.max(dim=1)
    return first.masked_fill_(top.isnan(), -1)
