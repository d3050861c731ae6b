"""The down projections of the chosen experts, for a few tokens. The kernel also adds the residual
and prepares the next norm.

A program computes some features of the residual stream for all tokens. It loops over the slots of
the `ExpertPlan`, one per chosen expert, and adds each expert's output to the rows of the tokens
that chose it. So the sum needs neither atomics nor a separate kernel, and its terms are always
added in the same order. With `splits` > 1, several programs divide the slots, and the last of them
to finish adds up their partial sums.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.comm.inbox_triton import inbox_of, send
from specdec_kernels.comm.peers import SUM_COLUMNS, Part
from specdec_kernels.experts.gate_up_triton import has_chosen
from specdec_kernels.experts.plan import ExpertPlan
from specdec_kernels.experts.reference import Experts
from specdec_kernels.experts.tiles import ExpertTiles
from specdec_kernels.gpu import CACHE_LINE, power_of_2_to
from specdec_kernels.launch_triton import (
    after_predecessor,
    dependence,
    is_last,
    options_of,
    room_for_splits,
)
from specdec_kernels.linear.few_rows_triton import (
    add_product,
    along_depth,
    along_rows,
    depth_of,
    load_weight,
    prefetch_rows,
    store_for_norm,
    sum_of_splits,
    tile_at,
    whole_sums,
    zero_sums,
)
from specdec_kernels.linear.mx_sums_triton import COLUMNS, LIFT, mx_sums
from specdec_kernels.linear.norm_triton import add_norm_triton
from specdec_kernels.linear.reference import Normed
from specdec_kernels.linear.stored_groups_triton import (
    along_features,
    form_of,
    operands_of,
    row_scaled,
    row_scales,
    rows_of,
)
from specdec_kernels.linear.stored_sums_triton import stored_sums
from specdec_kernels.linear.tiles import leaves_norm


@triton.jit(do_not_specialize=["num_rows"])
def down_kernel(
    x_ptr,  # [P, T, F], from `gate_up_kernel`
    count_ptr,  # this and the next 3: the first fields of `ExpertPlan`
    experts_ptr,
    chosen_ptr,
    weights_ptr,
    down_ptr,  # [E, N, F], or quantised codes as uint8 [E, N, bytes per row]
    scales_ptr,  # [E, N / FORM.high, FORM.groups]; None if not quantised
    zeros_ptr,  # shaped like the scales; None if the quantisation has none
    bias_ptr,  # [E, N], or None
    residual_ptr,  # [T, N], or None
    norm_ptr,  # [N], or None
    out_ptr,  # [T, N], out
    scaled_ptr,  # [T, N], out: the sum in out_ptr times the norm's weight; used only with norm_ptr
    out_squares_ptr,  # [T, N / BLOCK_N] fp32, out; used only with norm_ptr
    partial_ptr,  # [TILES.splits, T, N] fp32, out; None for one split
    counters_ptr,  # [>= N / block_n] int32, zeros; None for one split
    inboxes_ptr,  # this and the next 2: the fields of `Inbox`; None, None and 0 to store the result
    counts_ptr,
    inbox_first,
    num_rows,
    num_features,  # N
    residual_stride,
    F: tl.constexpr,
    FORM: tl.constexpr,  # `Form` of a quantised weight, or None
    TILES: tl.constexpr,
    PREFETCH: tl.constexpr,  # elements to prefetch from each weight row
    SIZE: tl.constexpr,  # the number of inboxes
    DEPENDENT: tl.constexpr,
):
    SWAP: tl.constexpr = TILES.block_m < 16 or FORM is not None
    TILED: tl.constexpr = FORM is not None and FORM.is_tiled
    ROW: tl.constexpr = F if FORM is None else F // FORM.per_code
    CHUNKS: tl.constexpr = (F + TILES.block_k - 1) // TILES.block_k
    EVEN: tl.constexpr = F % TILES.block_k == 0
    split = tl.program_id(1)
    column = tl.program_id(0) * TILES.block_n + tl.arange(0, TILES.block_n)
    column_live = column < num_features
    feature = tl.minimum(column, num_features - 1).to(tl.int64)
    rows_ptr = down_ptr + feature * ROW
    # The router finished before the predecessor started, so the plan may be read before the wait.
    count = tl.load(count_ptr)
    # Parts of slots, each of which may be the whole slot.
    first = count * TILES.parts * split // TILES.splits
    last = count * TILES.parts * (split + 1) // TILES.splits
    size = num_features.to(tl.int64) * ROW
    if TILES.ahead > 0:
        for slot in range(first, tl.minimum(first + TILES.ahead, last)):
            expert = tl.load(experts_ptr + slot).to(tl.int64)
            prefetch_rows(rows_ptr + expert * size, 0, PREFETCH)
    row = tl.arange(0, TILES.block_m)
    row_live = row < num_rows
    place = row.to(tl.int64)[:, None] * num_features + column[None, :]
    mask = row_live[:, None] & column_live[None, :]
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=column_live, other=0.0)
    if residual_ptr is not None:
        at = residual_ptr + row.to(tl.int64)[:, None] * residual_stride + column[None, :]
        residual = tl.load(at, mask=mask, other=0.0)
    after_predecessor(DEPENDENT)

    first_column = tl.program_id(0) * TILES.block_n
    if inboxes_ptr is not None:
        inbox = inbox_of(
            *(inboxes_ptr, counts_ptr, inbox_first, row, row_live, first_column),
            *(num_features, SIZE),
        )

    sums = zero_sums(TILES.block_m, TILES.block_n, TILES.slices, SWAP)
    if TILED:
        for unit in range(first, last):
            slot = unit // TILES.parts
            down_row = tl.load(experts_ptr + slot).to(tl.int64) * num_features + feature
            chose = has_chosen(tl.load(chosen_ptr + slot), row)
            x_rows = x_ptr + (slot * num_rows + row).to(tl.int64) * F
            sums += mx_sums(
                *(x_rows, chose, down_ptr, scales_ptr, down_row, unit % TILES.parts),
                *(F, FORM, TILES.block_k // COLUMNS, TILES.parts, TILES.num_stages),
            )
        sums *= LIFT
    elif FORM is None:
        inside = depth_of(0, TILES.block_k, TILES.slices)
        # Load the next expert's index one step ahead. If weights were loaded in the same step as
        # the index that their addresses need, Triton would pipeline them with half as many buffers.
        expert = tl.load(experts_ptr + first, mask=first < last, other=0)
        bits = tl.load(chosen_ptr + first, mask=first < last, other=0)
        for step in range(first * CHUNKS, last * CHUNKS):
            slot = step // CHUNKS
            k = step % CHUNKS * TILES.block_k + inside
            chose = has_chosen(bits, row)
            x_rows = x_ptr + (slot * num_rows + row).to(tl.int64) * F
            x_mask = along_rows(chose, TILES.slices) & along_depth(k < F, TILES.slices)
            x = tl.load(tile_at(x_rows, k, TILES.slices), mask=x_mask, other=0.0)
            rows = rows_ptr + expert.to(tl.int64) * size
            weight = load_weight(
                tile_at(rows, k, TILES.slices), along_depth(k < F, TILES.slices), EVEN
            )
            sums = add_product(x, weight, sums, TILES.slices, SWAP)
            following = tl.minimum((step + 1) // CHUNKS, last - 1)
            expert = tl.load(experts_ptr + following)
            bits = tl.load(chosen_ptr + following)
    else:
        for slot in range(first, last):
            expert = tl.load(experts_ptr + slot).to(tl.int64)
            chose = has_chosen(tl.load(chosen_ptr + slot), row)
            x_rows = x_ptr + (slot * num_rows + row).to(tl.int64) * F
            down_row = expert * num_features + feature
            codes, scales, zeros = rows_of(down_ptr, scales_ptr, zeros_ptr, down_row, F, FORM)
            none = tl.zeros(sums.shape, tl.float32)
            found, _ = stored_sums(
                *(x_rows, chose, codes, scales, zeros, codes, scales, zeros, column_live),
                *(0, ROW, none, none, F, FORM, TILES, False, 1),
            )
            scale = along_features(row_scales(scales, column_live, FORM), FORM, TILES.slices)
            sums += row_scaled(found, scale, FORM, x_ptr.dtype.element_ty)
    sums, _ = whole_sums(sums, sums, TILES.slices, SWAP)
    if bias_ptr is not None:  # added with the first part of each slot
        for slot in range(tl.cdiv(first, TILES.parts), tl.cdiv(last, TILES.parts)):
            chose = has_chosen(tl.load(chosen_ptr + slot), row)
            share = tl.load(weights_ptr + slot * num_rows + row, mask=chose, other=0.0)
            bias_at = bias_ptr + tl.load(experts_ptr + slot) * num_features + column
            bias = tl.load(bias_at, mask=column_live, other=0.0)
            sums += share[:, None] * bias.to(tl.float32)[None, :]

    if TILES.splits > 1:
        total = num_rows.to(tl.int64) * num_features
        tl.store(partial_ptr + split * total + place, sums, mask=mask)
        if not is_last(counters_ptr + tl.program_id(0), TILES.splits):
            return
        sums = sum_of_splits(partial_ptr, place, mask, total, TILES.splits)
    if residual_ptr is not None:
        sums += residual.to(tl.float32)
    out = sums.to(out_ptr.dtype.element_ty)
    if inboxes_ptr is not None:
        send(out, inbox, row_live, first_column, num_features, SIZE)
    else:
        tl.store(out_ptr + place, out, mask=mask)
    if norm_ptr is not None:
        store_for_norm(scaled_ptr, out_squares_ptr, out, norm, place, mask, row, row_live)


def down_add_norm_triton(
    x: Tensor,
    plan: ExpertPlan,
    experts: Experts,
    tiles: ExpertTiles,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> Normed:
    """Add the down projections of all chosen experts to the residual stream, and prepare the norm
    that follows.

    Args:
        x: [P, T, F], the result of `gate_up_triton`.
        residual: [T, N], rows contiguous.
        norm_weight: [N].
    """
    num_rows, num_features = residual.shape
    assert norm_weight.shape == (num_features,)
    hidden, scaled = (
        torch.empty((num_rows, num_features), dtype=x.dtype, device=x.device) for _ in range(2)
    )
    blocks = triton.cdiv(num_features, tiles.block_n)
    squares = torch.empty((num_rows, blocks), dtype=torch.float32, device=x.device)
    norm = norm_weight, scaled, squares
    launch_down(x, plan, experts, tiles, residual, Part(hidden, None), norm)
    if not leaves_norm(hidden):
        return add_norm_triton(hidden, None, norm_weight, eps)
    return Normed(hidden, scaled, squares, eps)


def launch_down(
    x: Tensor,
    plan: ExpertPlan,
    experts: Experts,
    tiles: ExpertTiles,
    residual: Tensor | None,
    part: Part,
    norm: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Launch `down_kernel`.

    residual: [T, N], rows contiguous; None to add nothing.
    part: where the sum goes.
    norm: the norm's weight and the output tensors `scaled` and `squares` of `Normed`, or None.
    """
    num_rows, num_features = part.into.shape
    width = experts.num_features
    assert x.shape == (len(plan.experts), num_rows, width) and x.is_contiguous()
    assert experts.down.shape == (experts.num_experts, num_features, width)
    assert num_rows <= tiles.block_m and part.into.is_contiguous()
    assert residual is None or (residual.shape == part.into.shape and residual.stride(1) == 1)
    assert part.inbox is None or (norm is None and SUM_COLUMNS % tiles.block_n == 0)
    blocks = triton.cdiv(num_features, tiles.block_n)
    parts = room_for_splits(tiles.splits, blocks, (num_rows, num_features), x.device)
    norm_weight, scaled, squares = norm or (None, None, None)
    ranks = 0 if part.inbox is None else len(part.inbox.pushed)
    dependent = dependence(x)
    constants = down_constants(width, experts, tiles, dependent["DEPENDENT"], ranks)
    down_kernel[(blocks, tiles.splits)](
        *(x, *plan[:4], *operands_of(experts.down), experts.down_bias),
        *(residual, norm_weight),
        *(part.into, scaled, squares, *parts, *(part.inbox or (None, None, 0))),
        *(num_rows, num_features, 0 if residual is None else residual.stride(0)),
        **constants | dependent,
    )


def down_constants(
    width: int, experts: Experts, tiles: ExpertTiles, early: bool, ranks: int = 0
) -> dict[str, Any]:
    """Return the constexpr arguments of `down_kernel` and its launch options.

    width: F, the number of features inside an expert.
    early: whether the kernel may start before its predecessor has ended.
    ranks: the number of inboxes; 0 to store the result.
    """
    held = operands_of(experts.down)[0]
    prefetch = power_of_2_to(held.shape[-1])  # rounded down, to stay inside the weight
    ahead = tiles.ahead if early and prefetch * held.element_size() >= CACHE_LINE else 0
    constants = {"F": width, "FORM": form_of(experts.down), "PREFETCH": prefetch, "SIZE": ranks}
    return options_of(tiles) | constants | {"TILES": tiles._replace(ahead=ahead)}
