"""Causal attention over packed rows, where each text of a row sees itself only.

On CUDA it uses flash attention over texts of any length, otherwise dense scores. `chained` adds the
keys of a row's own chain to those of true rows (EAGLE-3's training-time test). Flash attention's
backward takes the output and the logsumexp of both together, so no dense scores are needed. Legend:
B rows, N tokens a row, T = B * N, H heads, G key and value heads, D features, J keys of a chain.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

CLOSE = 2e-2  # flash attention and dense scores in bf16
NAME = "specdec_packed"  # name of this attention in transformers' models


@dataclass(frozen=True)
class Layout:
    """The texts of a batch of rows. segment: int64 [B, N], the text of each token. bounds: int32
    [texts + 1], the first token of each text in the flattened batch."""

    segment: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, segment: Tensor) -> "Layout":
        begins = torch.ones_like(segment, dtype=torch.bool)
        begins[:, 1:] = segment[:, 1:] != segment[:, :-1]
        firsts = begins.flatten().nonzero()[:, 0]
        end = firsts.new_tensor([segment.numel()])
        return cls(segment, torch.cat((firsts, end)).int())

    @property
    def longest(self) -> int:
        return self.segment.shape[1]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """`causal` over these texts."""
        return causal(q, k, v, self, scale)

    def sees(self, back: int) -> Tensor:
        """bool [B, 1, N, N]: whether a row sees another row of its text, at least `back` before
        it."""
        at = torch.arange(self.longest, device=self.segment.device)
        same = self.segment[:, :, None] == self.segment[:, None]
        return (same & (at[:, None] - at >= back)[None])[:, None]


Forward = Callable[[Tensor, Tensor, Tensor, Layout, float], tuple[Tensor, Tensor, Any]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Any]:
    """The output [T, H, D], the logsumexp [H, T], and the other inputs of the backward."""
    sizes = (layout.bounds, layout.bounds, layout.longest, layout.longest)
    out, lse, *state, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *sizes, 0.0, True, False, scale=scale
    )
    return out, lse, state


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Any,
    layout: Layout, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sizes = (layout.bounds, layout.bounds, layout.longest, layout.longest)
    found = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *sizes, 0.0, True, *state, scale=scale
    )
    return found[0], found[1], found[2]


def dense_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Any]:
    """As `flash_forward`, with dense scores."""
    scores = _scores(q, k, layout, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    values = _by_rows(v, layout, q.shape[1])
    out = (weights.to(v.dtype) @ values).transpose(1, 2).reshape(q.shape)
    return out, lse.transpose(0, 1).reshape(q.shape[1], -1), None


def dense_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Any,
    layout: Layout, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    by_row = lse.reshape(heads, *layout.segment.shape).transpose(0, 1)
    weights = (_scores(q, k, layout, scale) - by_row[..., None]).exp()
    g, o = (_by_rows(x, layout, heads).float() for x in (grad, out))
    keys, values, queries = (_by_rows(x, layout, heads).float() for x in (k, v, q))
    ds = weights * (g @ values.transpose(2, 3) - (g * o).sum(-1, keepdim=True)) * scale
    found = (ds @ keys, ds.transpose(2, 3) @ queries, weights.transpose(2, 3) @ g)
    dq, dk, dv = (x.transpose(1, 2).flatten(0, 1) for x in found)
    dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _by_rows(x: Tensor, layout: Layout, heads: int) -> Tensor:
    """x [T, H or G, D] as [B, H, N, D]."""
    rows = x.view(*layout.segment.shape, *x.shape[1:]).transpose(1, 2)
    return rows.repeat_interleave(heads // x.shape[1], 1)


def _scores(q: Tensor, k: Tensor, layout: Layout, scale: float) -> Tensor:
    heads = q.shape[1]
    scores = _by_rows(q, layout, heads) @ _by_rows(k, layout, heads).transpose(2, 3)
    return (scores.float() * scale).masked_fill(~layout.sees(0), float("-inf"))


class _Chained(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, own: Tensor, values: Tensor,
        layout: Layout, scale: float, parts: tuple[Forward, Backward],
    ) -> Tensor:  # fmt: skip
        # A row that ends a chain of J rows sees true rows at least J before it. Moved by J rows,
        # its query sees the rows that a causal mask shows. Rows that reach into another text mean
        # nothing.
        back = own.shape[-1]
        moved = q.roll(-back, 0)
        out, lse, state = parts[0](moved, k, v, layout, scale)
        true = lse.roll(back, 1).T  # [T, H]
        both = torch.logaddexp(true, own.logsumexp(-1))
        weights = (own - both[..., None]).exp()
        mixed = out.roll(back, 0).float() * (true - both).exp()[..., None]
        mixed = mixed + (weights[..., None] * values.float()).sum(2)
        mixed = mixed.to(q.dtype)
        ctx.save_for_backward(moved, k, v, values, mixed, weights, both)
        ctx.rest = state, layout, scale, parts
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        moved, k, v, values, mixed, weights, both = ctx.saved_tensors
        state, layout, scale, parts = ctx.rest
        (grad,) = grads
        back = weights.shape[-1]
        wide = grad.float()
        delta = (wide * mixed.float()).sum(-1, keepdim=True)
        d_weights = (wide[:, :, None] * values.float()).sum(-1)
        d_own = weights * (d_weights - delta)
        d_values = (weights[..., None] * wide[:, :, None]).to(values.dtype)
        lse = both.T.roll(-back, 1).contiguous()
        dq, dk, dv = parts[1](
            grad.roll(-back, 0), moved, k, v, mixed.roll(-back, 0), lse, state, layout, scale
        )
        return dq.roll(back, 0), dk, dv, d_own, d_values, None, None, None


FLASH, DENSE = (flash_forward, flash_backward), (dense_forward, dense_backward)


_on_cuda = [FLASH]


def parts_for(device: torch.device) -> tuple[Forward, Backward]:
    return _on_cuda[-1] if device.type == "cuda" else DENSE


def use_dense() -> None:
    """Compute dense scores on CUDA too, because flash attention failed its check."""
    _on_cuda.append(DENSE)


def chained(
    q: Tensor, keys: list[Tensor], values: list[Tensor], layout: Layout, scale: float,
    parts: tuple[Forward, Backward],
) -> Tensor:  # fmt: skip
    """Attention of one step's rows over true rows, and over the rows of their own chains.

    q: [T, H, D]. keys and values: [T, G, D] of each step so far; a chain's row of step i lies
    (number of steps - i) rows above its end. Row t of step J has a meaning from row J of its text
    on. Returns [T, H, D].
    """
    chain = range(1, len(keys))
    if not chain:
        plain: Tensor = _Causal.apply(q, keys[0], values[0], layout, scale, parts)
        return plain
    groups = q.shape[1] // keys[0].shape[1]
    ours = [keys[i].roll(len(keys) - 1 - i, 0).repeat_interleave(groups, 1) for i in chain]
    own = torch.stack([(q.float() * k.float()).sum(-1) for k in ours], -1) * scale
    theirs = [values[i].roll(len(keys) - 1 - i, 0).repeat_interleave(groups, 1) for i in chain]
    mixed: Tensor = _Chained.apply(
        q, keys[0], values[0], own, torch.stack(theirs, 2), layout, scale, parts
    )
    return mixed


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float,
        parts: tuple[Forward, Backward],
    ) -> Tensor:  # fmt: skip
        out, lse, state = parts[0](q, k, v, layout, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = state, layout, scale, parts
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        state, layout, scale, parts = ctx.rest
        q, k, v, out, lse = ctx.saved_tensors
        return (*parts[1](grads[0].contiguous(), q, k, v, out, lse, state, layout, scale),) + (
            None,
        ) * 3


def causal(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """Attention [B, N, H, D] of packed rows. q: [B, N, H, D]. k and v: [B, N, G, D]."""
    flat = (x.flatten(0, 1) for x in (q, k, v))
    out: Tensor = _Causal.apply(*flat, layout, scale, parts_for(q.device))
    return out.unflatten(0, (q.shape[0], -1))


Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # as `causal`, for one batch
_attend_now: list[Attend] = []


@contextmanager
def reading(attend: Attend) -> Iterator[None]:
    """Give models whose attention is `NAME` the attention of a batch."""
    _attend_now.append(attend)
    try:
        yield
    finally:
        _attend_now.pop()


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any,
    scaling: float | None = None, dropout: float = 0.0, **settings: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention in transformers' form: q [B, H, N, D], k and v [B, G, N, D]. Returns [B, N, H,
    D]."""
    for key_of in ("sliding_window", "softcap", "s_aux"):
        if settings.get(key_of) is not None:
            raise ValueError(f"attention with {key_of} is not built here")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _attend_now[-1](q, k, v, scale), None


AttentionInterface.register(NAME, _attend)


def differs(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """The largest difference between flash attention and dense scores over chains, gradients
    included, relative to the largest number."""
    torch.manual_seed(0)
    segment = torch.tensor([0] * 40 + [1] * 57 + [2] * 31, device=device).view(1, -1)
    layout, worst, found = Layout.of(segment), 0.0, []
    for parts in (FLASH, DENSE):
        torch.manual_seed(0)
        q = [torch.randn(128, 6, 64, device=device, dtype=dtype) for _ in range(3)]
        k, v = (
            [torch.randn(128, 2, 64, device=device, dtype=dtype) for _ in range(3)]
            for _ in range(2)
        )
        for x in (*q, *k, *v):
            x.requires_grad_()
        position = torch.cat([torch.arange(n, device=device) for n in (40, 57, 31)])
        outs = []
        for j in range(3):
            out = chained(q[j], k[: j + 1], v[: j + 1], layout, 0.125, parts)
            outs.append(out * (position >= j)[:, None, None])
        sum((o.float() ** 2).sum() for o in outs).backward()  # type: ignore[union-attr]
        found.append([*outs, *(x.grad for x in (*q, *k, *v))])
    for ours, theirs in zip(*found, strict=True):
        reach = theirs.float().abs().max()
        worst = max(worst, float((ours.float() - theirs.float()).abs().max() / reach))
    return worst


def flash_is_right(device: torch.device) -> bool:
    """True if flash attention gives the numbers of dense scores here; the result is printed.
    torch's operators of this name are not public, and another version may change them."""
    try:
        apart = differs(device)
    except (RuntimeError, TypeError, ValueError) as problem:
        print(f"flash attention fails: {str(problem)[:200]}", flush=True)
        return False
    print(f"flash attention against dense scores: {apart:.1e}", flush=True)
    return apart < CLOSE
