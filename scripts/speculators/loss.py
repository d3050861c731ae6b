"""Soft cross-entropy with a target's distribution over a subset of its vocabulary.

Gradients with respect to hidden states, and to the head's rows where a kind adds trained columns to
the target's, are known as soon as the loss is: neither logits nor probabilities are kept.
Legend: T tokens, H width, S ids of the subset, V ids.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """The ids over which distributions are compared: the frequent ones, and some of the rest, drawn
    again at each step. Distributions agree over every subset only if they agree as a whole. often:
    int64 [M] and rest: int64 [V - M], all different. count: the number of drawn ids.
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


def rows_of(logits: Tensor, wanted: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted sum of cross-entropies, its gradient [T, S] with respect to the logits, and each
    row's share of drafts that would be accepted, fp32 [T], the overlap of both distributions.

    logits and wanted: [T, S]. weight: fp32 [T].
    """
    wide = logits.float()
    lse = wide.logsumexp(-1, keepdim=True)
    loss = ((lse[:, 0] - (wanted.float() * wide).sum(-1)) * weight).sum()
    drawn = (wide - lse).exp()
    common = torch.minimum(drawn, wanted.float()).sum(-1)
    return loss, ((drawn - wanted.float()) * weight[:, None]).to(logits.dtype), common


class _SoftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, wanted: Tensor, weight: Tensor,
        rows: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        mine = hidden.to(head.dtype)
        loss, grad, common = rows(mine @ head.T, wanted, weight)
        of_head = grad.T @ mine if ctx.needs_input_grad[1] else None
        ctx.save_for_backward((grad @ head).to(hidden.dtype), of_head)
        ctx.mark_non_differentiable(common)
        return loss, common

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = (None if g is None else g * grads[0].to(g.dtype) for g in ctx.saved_tensors)
        return *found, None, None, None


def _compiled(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain`, compiled. If a call cannot be compiled, this and later calls run it uncompiled."""
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
    """The loss, with its elementwise parts compiled if possible."""

    def __init__(self, is_compiled: bool) -> None:
        self.rows: Callable[..., tuple[Tensor, Tensor, Tensor]] = rows_of
        self.probabilities: Callable[..., Tensor] = probabilities
        if is_compiled:
            self.rows = _compiled(rows_of)
            self.probabilities = _compiled(probabilities)

    def __call__(
        self, hidden: Tensor, head: Tensor, wanted: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The weighted sum, a scalar, and the share of drafts that would be accepted, fp32 [T].

        hidden: [T, H], normed. head: [S, H]. wanted: [T, S]. weight: fp32 [T].
        """
        found: tuple[Tensor, Tensor] = _SoftLoss.apply(hidden, head, wanted, weight, self.rows)
        return found
