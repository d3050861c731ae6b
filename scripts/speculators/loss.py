"""Soft cross-entropy with a target's distribution over a subset of its vocabulary.

The rows of the head matrix are the target's own and are not trained, so the gradient with respect
to the hidden states is known as soon as the loss is: neither logits nor probabilities are kept.
Legend: T tokens, H width, S ids of the subset, V ids.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """Ids over which distributions are compared: the frequent ones, and some of the rest, drawn
    anew at each step. Distributions over a subset agree for every subset only if the whole ones do.

    often: int64 [M] and rest: int64 [V - M], all different. count: of those drawn.
    """

    often: Tensor
    rest: Tensor
    count: int

    @classmethod
    def of(cls, often: Tensor, vocab_size: int, count: int, device: torch.device) -> "Candidates":
        is_often = torch.zeros(vocab_size, dtype=torch.bool)
        is_often[often] = True
        rest = (~is_often).nonzero()[:, 0]
        return cls(often.to(device), rest.to(device), min(count, len(rest)))

    def draw(self, generator: torch.Generator) -> Tensor:
        """int64 [S]"""
        if self.count == len(self.rest):
            return torch.cat((self.often, self.rest))
        device = self.rest.device
        order = torch.rand(len(self.rest), generator=generator, device=device).argsort()
        return torch.cat((self.often, self.rest[order[: self.count]]))


def probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """The distribution [T, S] of logits [T, V] over `ids` [S], in the logits' dtype."""
    return logits[:, ids].float().softmax(-1).to(logits.dtype)


def rows_of(logits: Tensor, wanted: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted sum of cross-entropies, and its gradient [T, S] with respect to the logits.

    logits and wanted: [T, S]. weight: fp32 [T].
    """
    wide = logits.float()
    lse = wide.logsumexp(-1, keepdim=True)
    loss = ((lse[:, 0] - (wanted.float() * wide).sum(-1)) * weight).sum()
    grad = ((wide - lse).exp() - wanted.float()) * weight[:, None]
    return loss, grad.to(logits.dtype)


class _SoftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, wanted: Tensor, weight: Tensor,
        rows: Callable[..., tuple[Tensor, Tensor]],
    ) -> Tensor:  # fmt: skip
        loss, grad = rows(hidden.to(head.dtype) @ head.T, wanted, weight)
        ctx.save_for_backward((grad @ head).to(hidden.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (
            ctx.saved_tensors[0] * grads[0].to(ctx.saved_tensors[0].dtype),
            None,
            None,
            None,
            None,
        )


def _compiled(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain`, compiled; as it is, from the first call on that cannot be compiled."""
    chosen = [torch.compile(plain, dynamic=False)]

    def call(*tensors: Tensor) -> Any:
        try:
            return chosen[-1](*tensors)
        except RuntimeError as problem:
            if chosen[-1] is plain:
                raise
            print(f"{plain.__name__} is not compiled: {str(problem)[:200]}", flush=True)
            chosen.append(plain)
            return plain(*tensors)

    return call


class SoftLoss:
    """The loss with its elementwise parts compiled, where that works."""

    def __init__(self, is_compiled: bool) -> None:
        self.rows: Callable[..., tuple[Tensor, Tensor]] = rows_of
        self.probabilities: Callable[..., Tensor] = probabilities
        if is_compiled:
            self.rows = _compiled(rows_of)
            self.probabilities = _compiled(probabilities)

    def __call__(self, hidden: Tensor, head: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
        """hidden: [T, H], normed. head: [S, H]. wanted: [T, S]. weight: fp32 [T]. A scalar, the
        weighted sum."""
        loss: Tensor = _SoftLoss.apply(hidden, head, wanted, weight, self.rows)
        return loss
