"""Mixtures of experts in a decoder layer: the operands, and torch references.

A router scores all experts for each token, and the token passes through the few with the highest
scores (Shazeer et al., arXiv 1701.06538). Scores are rounded as in transformers. Sigmoid
scores, with groups of experts and a bias that only affects the choice, come from DeepSeek-V3 (arXiv
2412.19437).

Dimensions in shapes:
    T: packed tokens
    K, N: features of an expert's input and of its output, both the width of the residual stream
    E: experts
    F: features inside an expert
    C: experts per token
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.dispatch import kernel
from specdec_kernels.linear.reference import Normed, gate, normed
from specdec_kernels.linear.stored import Stored, plain_of

CLAMPED = "clamped"  # an activation that only experts have, see `activated`
TINY = 1e-20  # added to a sum of sigmoid weights before dividing by the sum, which may be 0


class Routing(NamedTuple):
    """The rule that turns a router's logits into experts and their weights."""

    num_chosen: int
    """C, the number of experts that a token chooses."""
    softmax_first: bool = True
    """True: softmax over all experts' logits. False: only over those of the chosen experts."""
    renormalise: bool = False
    """Divide the probabilities of the chosen experts by their sum."""
    rounds: bool = True
    """True: round the weights to the dtype of the logits. False: keep them in fp32."""
    sigmoid: bool = False
    """Scores are sigmoids of fp32 logits instead of softmax probabilities. If True, `softmax_first`
    and `rounds` are not used."""
    num_groups: int = 1
    """With `sigmoid`: the number of groups into which consecutive experts are divided equally."""
    kept_groups: int = 1
    """With `num_groups` > 1: the number of groups from which a token may choose experts. The groups
    whose two highest scores have the largest sums are kept."""
    scaling: float = 1.0
    """With `sigmoid`: the factor by which the weights are multiplied."""


class Experts(NamedTuple):
    """The weights of one layer's experts and router."""

    router: Tensor
    """[E, K], the router's weight."""
    gate_up: Tensor | Stored
    """[E, 2F, K], the rows of the gate projection and then those of the up projection. With
    `interleaved`, rows of gate and up alternate."""
    down: Tensor | Stored
    """[E, N, F], the down projections."""
    routing: Routing
    activation: str = "silu"
    """"silu", "gelu_tanh", or CLAMPED."""
    router_bias: Tensor | None = None
    """[E], added to the router's logits."""
    choice_bias: Tensor | None = None
    """[E], or None. With `Routing.sigmoid`: added to the scores to choose experts. The weights are
    computed from the scores without it."""
    gate_up_bias: Tensor | None = None
    """[E, 2F], in the order of `gate_up`."""
    down_bias: Tensor | None = None
    """[E, N], added to the down projection."""
    interleaved: bool = False
    slope: float = 1.702
    """For the activation CLAMPED: the factor inside the sigmoid."""
    limit: float = 7.0
    """For the activation CLAMPED: the maximum of the gate and of the absolute value of up."""
    read: Tensor | None = None
    """[1] int32, or None. Each call writes the number of chosen experts to this tensor, that is,
    the number of experts whose weights it reads."""

    @property
    def num_experts(self) -> int:
        return self.down.shape[0]

    @property
    def num_features(self) -> int:
        """F, the number of features inside an expert."""
        return self.down.shape[2]


class Routes(NamedTuple):
    """The experts of each token."""

    experts: Tensor
    """[T, C] int64, the indices of the chosen experts."""
    weights: Tensor
    """[T, C], the factors by which the experts' outputs are multiplied."""


def logits_of(x: Tensor, experts: Experts) -> Tensor:
    """Return the router's logits [T, E] for x [T, K]. They are in fp32 or wider if
    `Routing.sigmoid` is set."""
    router, bias = experts.router, experts.router_bias
    if experts.routing.sigmoid:
        wide = torch.promote_types(x.dtype, torch.float32)
        x, router = x.to(wide), router.to(wide)
    return F.linear(x, router, bias)


def routes_of(logits: Tensor, routing: Routing, choice_bias: Tensor | None = None) -> Routes:
    """Choose each token's experts and compute their weights.

    logits: [T, E], from `logits_of`.
    choice_bias: [E], or None, from `Experts.choice_bias`.
    """
    if routing.sigmoid:
        return _routes_by_sigmoids(logits, routing, choice_bias)
    if not routing.softmax_first:
        top, experts = torch.topk(logits, routing.num_chosen, dim=-1)
        return Routes(experts, torch.softmax(top, dim=-1, dtype=top.dtype))
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights, experts = torch.topk(
        torch.softmax(logits, dim=-1, dtype=wide), routing.num_chosen, dim=-1
    )
    if routing.renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routes(experts, weights.to(logits.dtype) if routing.rounds else weights)


def _routes_by_sigmoids(logits: Tensor, routing: Routing, choice_bias: Tensor | None) -> Routes:
    scores = logits.sigmoid()
    ranks = scores if choice_bias is None else scores + choice_bias
    if routing.num_groups > 1:
        grouped = ranks.unflatten(1, (routing.num_groups, -1))
        sums = grouped.topk(2, dim=-1).values.sum(dim=-1)
        kept = torch.topk(sums, routing.kept_groups, dim=-1, sorted=False).indices
        is_kept = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, kept, True)
        ranks = grouped.masked_fill(~is_kept[:, :, None], float("-inf")).flatten(1)
    experts = torch.topk(ranks, routing.num_chosen, dim=-1, sorted=False).indices
    weights = scores.gather(1, experts)
    if routing.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    return Routes(experts, weights * routing.scaling)


def activated(gate_up: Tensor, experts: Experts) -> Tensor:
    """Apply the activation to the gate and multiply it by up. gate_up is [..., 2F], in the order of
    `Experts.gate_up`, and the result [..., F].

    CLAMPED is gpt-oss's activation. With g = min(gate, limit) and u = up clamped to +-limit, it is
    g * sigmoid(slope * g) * (u + 1).
    """
    if experts.interleaved:
        gate_up = gate_up.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    if experts.activation != CLAMPED:
        return gate.reference(gate_up, experts.activation)
    first, up = gate_up.chunk(2, dim=-1)
    first = first.clamp(max=experts.limit)
    up = up.clamp(-experts.limit, experts.limit)
    return (up + 1) * (first * torch.sigmoid(first * experts.slope))


def mixture_reference(x: Tensor, routes: Routes, experts: Experts) -> Tensor:
    """Return the weighted sum [T, N] of the chosen experts' outputs for x [T, K]. On a GPU this is
    slow, because the host must wait for the routes."""
    num_rows, count = routes.experts.shape
    order = routes.experts.flatten().argsort(stable=True)
    sizes = torch.bincount(routes.experts.flatten(), minlength=experts.num_experts).tolist()
    out = x.new_empty((num_rows * count, experts.down.shape[1]))
    rows = order // count
    start = 0
    for expert, size in enumerate(sizes):
        if not size:
            continue
        stop = start + size
        gate_up_bias, down_bias = (
            None if bias is None else bias[expert]
            for bias in (experts.gate_up_bias, experts.down_bias)
        )
        gate_up, down = (plain_of(w[expert], x.dtype) for w in (experts.gate_up, experts.down))
        inner = activated(F.linear(x[rows[start:stop]], gate_up, gate_up_bias), experts)
        out[order[start:stop]] = F.linear(inner, down, down_bias)
        start = stop
    parts = out.view(num_rows, count, -1) * routes.weights[:, :, None]
    return parts.sum(dim=1).to(x.dtype)


@kernel("specdec_kernels.experts.mixture_triton:in_tiles_triton")
def in_tiles(experts: Experts, dtype: torch.dtype) -> Experts:
    """Return the experts with weights in the order in which `mixture_add_norm` reads them fastest.
    On CUDA, these are copies as by `Stored.tiled` of weights in mxfp4; all others stay the same.

    dtype: that of x.
    """
    return experts


@kernel("specdec_kernels.experts.mixture_triton:mixture_add_norm_triton")
def mixture_add_norm(x: Normed, experts: Experts, norm_weight: Tensor, eps: float) -> Normed:
    """Add the weighted sum of the chosen experts' outputs to the residual stream, and apply the
    norm that follows.

    x: [T, K], as returned by `linear_add_norm` or `add_norm`.
    experts: the weights must be contiguous. The number of chosen experts is written to
        `experts.read` if that is not None.
    norm_weight: [K], the weight of the next layer's norm, or of the final norm.
    eps: the epsilon of the same norm.

    Returns the new residual stream, in `hidden`, and the input of the next matmul.
    """
    assert x.squares is None
    routes = routes_of(logits_of(x.scaled, experts), experts.routing, experts.choice_bias)
    if experts.read is not None:
        experts.read.fill_(len(routes.experts.unique()))
    mixed = mixture_reference(x.scaled, routes, experts)
    return normed(x.hidden + mixed, norm_weight, eps)
