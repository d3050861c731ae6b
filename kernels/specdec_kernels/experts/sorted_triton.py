"""Mixtures of experts for many tokens: torch's grouped matmuls over tokens sorted by expert."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.experts.reference import Experts, Routes, activated, logits_of, routes_of
from specdec_kernels.launch_triton import after_predecessor, dependence
from specdec_kernels.linear.norm_triton import gate_triton, normed_row
from specdec_kernels.linear.reference import Normed


@triton.jit
def combine_kernel(
    parts_ptr,  # [T * C, K]
    places_ptr,  # [T, C] int64, each pair's row in parts_ptr; None if rows are in pair order
    weights_ptr,  # [T, C]
    residual_ptr,  # [T, K], or None
    norm_ptr,  # [K], or None
    hidden_ptr,  # [T, K], out
    out_ptr,  # [T, K], out: the norm of the sum in hidden_ptr; used only with norm_ptr
    residual_stride,
    eps,
    K: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,  # C
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    eps = tl.full([], eps, tl.float32)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + k, mask=k < K, other=0.0)
    after_predecessor(DEPENDENT)
    mixed = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        place = row * NUM_CHOSEN + choice
        weight = tl.load(weights_ptr + place).to(tl.float32)
        if places_ptr is not None:
            place = tl.load(places_ptr + place)
        part = tl.load(parts_ptr + place * K + k, mask=k < K, other=0.0)
        mixed += weight * part.to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + k, mask=k < K, other=0.0)
        mixed += residual.to(tl.float32)
    x = mixed.to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + row * K + k, x, mask=k < K)
    if norm_ptr is not None:
        tl.store(out_ptr + row * K + k, normed_row(x, norm, eps, K), mask=k < K)


def combine_triton(
    parts: Tensor,
    places: Tensor | None,
    weights: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    into: Tensor | None = None,
) -> Normed:
    """Add the weighted sum of each token's expert outputs to the residual stream, and apply the
    norm. Without a norm, the result has the sum in place of its norm.

    Args:
        parts: [T * C, K], contiguous, the output of each pair of a token and an expert.
        places: [T, C] int64, the row of `parts` that holds the output of token t and its expert c.
            None if that row is t * C + c.
        weights: [T, C], the routing weight of each pair.
        residual: [T, K], rows contiguous; None to add nothing.
        into: [T, K], contiguous, the buffer for the sum; None to allocate one.
    """
    num_rows, width = len(weights), parts.shape[1]
    assert parts.shape == (weights.numel(), width) and parts.is_contiguous()
    assert weights.is_contiguous()
    assert places is None or (places.shape == weights.shape and places.is_contiguous())
    hidden = parts.new_empty(num_rows, width) if into is None else into
    assert hidden.shape == (num_rows, width) and hidden.is_contiguous()
    assert residual is None or (residual.shape == hidden.shape and residual.stride(1) == 1)
    out = hidden if norm_weight is None else torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    combine_kernel[(num_rows,)](
        *(parts, places, weights, residual, norm_weight, hidden, out),
        *(0 if residual is None else residual.stride(0), float(eps)),
        K=width,
        NUM_CHOSEN=weights.shape[1],
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **dependence(hidden),
    )
    return Normed(hidden, out, None, eps)


def sorted_mixture_add_norm(
    x: Normed,
    experts: Experts,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    into: Tensor | None = None,
) -> Normed:
    """Add the mixture of an x [T, K] that is already normalised to `residual`. The host does not
    wait for any result. The arguments that `ops.mixture_add_norm` lacks are those of
    `combine_triton`."""
    assert x.squares is None
    routes = routes_of(logits_of(x.scaled, experts), experts.routing, experts.choice_bias)
    if experts.read is not None:
        used = experts.read.new_zeros(experts.num_experts).scatter_(0, routes.experts.flatten(), 1)
        torch.sum(used, 0, keepdim=True, dtype=torch.int32, out=experts.read)
    parts, places = sorted_parts(x.scaled, routes, experts)
    return combine_triton(parts, places, routes.weights, residual, norm_weight, eps, into)


def sorted_parts(x: Tensor, routes: Routes, experts: Experts) -> tuple[Tensor, Tensor]:
    """Compute the outputs of each token's chosen experts for x [T, K].

    Returns the outputs [T * C, N], sorted by expert, and the indices of the rows that hold each
    token's outputs, int64 [T, C].
    """
    count = routes.experts.shape[1]
    chosen, order = routes.experts.flatten().sort(stable=True)
    all_experts = torch.arange(experts.num_experts, device=x.device)
    ends = torch.searchsorted(chosen, all_experts, right=True).to(torch.int32)
    assert isinstance(experts.gate_up, Tensor) and isinstance(experts.down, Tensor)
    inner = _products(x[order // count], experts.gate_up, experts.gate_up_bias, chosen, ends)
    if experts.interleaved or experts.activation not in ("silu", "gelu_tanh"):
        inner = activated(inner, experts)
    else:
        inner = gate_triton(inner, experts.activation)
    parts = _products(inner, experts.down, experts.down_bias, chosen, ends)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=x.device)
    return parts, places.view_as(routes.experts)


def _products(
    x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor, ends: Tensor
) -> Tensor:
    """Multiply each row of x by the weight of its expert, and add the expert's bias.

    x: [S, K], rows sorted by expert.
    weight: [E, N, K].
    bias: [E, N], or None.
    chosen: [S], the expert of each row.
    ends: int32 [E], the index after each expert's last row.
    """
    out = F.grouped_mm(x, weight.transpose(-1, -2), offs=ends)
    return out if bias is None else out + bias[chosen]
