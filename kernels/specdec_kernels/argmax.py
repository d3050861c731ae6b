"""Greedy choice of a token: torch reference."""

import torch
from torch import Tensor


def greedy_argmax_reference(logits: Tensor) -> Tensor:
    """See `ops.greedy_argmax`."""
    # Which of equal values torch's argmax returns is not specified; here it is the first.
    top = logits.amax(1, keepdim=True)
    index = torch.arange(logits.shape[1], device=logits.device)
    first = torch.where(logits == top, index, logits.shape[1]).amin(1)
    return torch.where(top[:, 0].isnan(), -1, first)
