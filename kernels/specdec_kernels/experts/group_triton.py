"""The router of more tokens: logits, experts, weights, and pairs grouped by expert, in one kernel.

Each program computes the logits of some tokens and experts. The last one of some tokens chooses
their experts, and enters each pair of a token and an expert at the expert's next free place. So the
order of an expert's pairs varies, which no result depends on. Reads nothing on the host.
"""

import triton
import triton.language as tl

from specdec_kernels.experts.plan import Groups, empty_groups
from specdec_kernels.experts.reference import Experts
from specdec_kernels.experts.route_triton import (
    BLOCK_E,
    BLOCK_M,
    empty_logits,
    route_constants,
    store_logits,
    weights_of,
)
from specdec_kernels.launch_triton import counters, dependence, is_last
from specdec_kernels.linear.reference import Normed

SIZES = tl.constexpr(1024)  # counters of programs, before those of experts' pairs


@triton.jit(do_not_specialize=["num_rows"])
def group_kernel(
    x_ptr,  # [T, K]
    squares_ptr,  # [T, P] fp32, sums of squares of parts of each row; only with PARTS
    router_ptr,  # [E, K]
    bias_ptr,  # [E], or None
    choice_bias_ptr,  # [E], or None
    logits_ptr,  # [T, E], out
    counters_ptr,  # [>= SIZES + E] int32, zeros
    sizes_ptr,  # the groups' tensors, out; factors only with PARTS
    pairs_ptr,
    weights_ptr,
    factors_ptr,
    read_ptr,  # [1] int32, the number of experts that have a pair, out; or None
    num_rows,
    num_experts,  # E
    x_stride,
    eps,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    SOFTMAX_FIRST: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROUNDS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    SCALING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_ALL: tl.constexpr,  # at least E
    BLOCK_P: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICES: tl.constexpr,
    EARLY: tl.constexpr,  # numbers of each row of the router that are loaded before the wait
    DEPENDENT: tl.constexpr,
):
    column = tl.arange(0, BLOCK_ALL)
    known = column < num_experts
    choice_bias = tl.zeros([BLOCK_ALL], tl.float32)
    if choice_bias_ptr is not None:
        choice_bias += tl.load(choice_bias_ptr + column, mask=known, other=0.0).to(tl.float32)
    store_logits(
        *(x_ptr, squares_ptr, router_ptr, bias_ptr, logits_ptr, factors_ptr),
        *(num_rows, num_experts, x_stride, eps, K, PARTS),
        *(BLOCK_M, BLOCK_E, BLOCK_P, DEPTH, SLICES, EARLY, DEPENDENT),
    )
    block = tl.program_id(1)
    if not is_last(counters_ptr + 1 + block, tl.num_programs(0)):
        return

    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_live = row < num_rows
    # Rows past the last one repeat it, so that they divide by no zero.
    place = tl.minimum(row, num_rows - 1)[:, None] * num_experts + column[None, :]
    logits = tl.load(
        logits_ptr + place, mask=known[None, :], other=float("-inf"), cache_modifier=".cg"
    ).to(tl.float32)
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    chosen, weights = weights_of(
        *(logits, known[None, :], choice_bias, num_experts, dtype, NUM_CHOSEN),
        *(SOFTMAX_FIRST, RENORMALISE, ROUNDS, SIGMOID, NUM_GROUPS, KEPT_GROUPS, SCALING),
    )
    pair = row[:, None] * NUM_CHOSEN + tl.cumsum(chosen, axis=1) - 1
    is_pair = (chosen != 0) & row_live[:, None]
    tl.store(weights_ptr + pair, weights, mask=is_pair)
    sums_ptr = counters_ptr + SIZES + column
    every = tl.broadcast_to(sums_ptr[None, :], chosen.shape)
    place = tl.atomic_add(every, 1, mask=is_pair, sem="relaxed", scope="gpu")
    tl.store(pairs_ptr + column[None, :] * num_rows + place, pair, mask=is_pair)
    if not is_last(counters_ptr, tl.num_programs(1)):
        return

    size = tl.load(sums_ptr, mask=known, other=0, cache_modifier=".cg")
    tl.store(sizes_ptr + column, size, mask=known)
    tl.store(sums_ptr, 0, mask=known)
    if read_ptr is not None:
        tl.store(read_ptr, tl.sum((size > 0).to(tl.int32)))


def group_triton(x: Normed, experts: Experts) -> Groups:
    """The groups of some tokens, x [T, K]."""
    rows, (num_rows, width) = x.scaled, x.scaled.shape
    num_experts = experts.num_experts
    assert rows.stride(1) == 1
    assert experts.router.shape == (num_experts, width) and experts.router.is_contiguous()
    parts = 0 if x.squares is None else x.squares.shape[1]
    assert x.squares is None or x.squares.is_contiguous()
    groups = empty_groups(num_rows, experts, x.squares is not None, rows.device)
    blocks = triton.cdiv(num_rows, BLOCK_M)
    assert blocks < SIZES.value
    logits = empty_logits(x, experts)
    constants = route_constants(num_rows, parts, experts, rows.element_size())
    group_kernel[(triton.cdiv(num_experts, BLOCK_E), blocks)](
        *(rows, x.squares, experts.router, experts.router_bias, experts.choice_bias),
        *(
            logits,
            counters(rows.device),
            *groups,
            experts.read,
            num_rows,
            num_experts,
            rows.stride(0),
            float(x.eps),
        ),
        **{name: value for name, value in constants.items() if name != "BLOCK_T"},
        **dependence(rows),
    )
    return groups
