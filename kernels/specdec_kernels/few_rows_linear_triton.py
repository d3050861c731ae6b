"""A product of few rows with what surrounds it, bound by reading the weight once.

A program holds all rows and BLOCK_N features, and streams its rows of the weight through shared
memory. The norm needs no pass of its own: its factor is one number a row, so the kernel that writes
the residual stream also writes it times the norm's weight, and sums of squares, and the next one
scales its product at the end. Before it waits for its predecessor, a program asks for its first
weights, and may load its last ones into registers, so that memory stays busy from one kernel to the
next. Its warps share the depth of a tile: a warp's products of one sum wait for each other, and
that can take longer than the weights are on the way.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.hopper import CACHE_LINE
from specdec_kernels.launch_triton import (
    COUNTERS,
    after_predecessor,
    counters,
    dependent_launch,
    is_last,
    prefetch_l2,
)
from specdec_kernels.linear_outputs import linear_outputs
from specdec_kernels.linear_tiles import Tiles
from specdec_kernels.norm_triton import activate

LINE = tl.constexpr(CACHE_LINE)


@triton.jit
def product(
    x,  # [M, K] or [SLICES, M, K]
    weight,  # [N, K] or [SLICES, N, K]
    acc,  # [M, N] or [SLICES, M, N]; with SWAP [N, M] or [SLICES, N, M]
    SLICES: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    if UPCAST:
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    if SWAP:
        acc = tl.dot(weight, transposed(x, SLICES), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, transposed(weight, SLICES), acc, input_precision=PRECISION)
    return acc


@triton.jit
def transposed(tile, SLICES: tl.constexpr):
    """A matrix, or SLICES of them, transposed."""
    if SLICES == 1:
        return tl.trans(tile)
    else:
        return tl.permute(tile, (0, 2, 1))


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_linear_kernel(
    x_ptr,  # [T, K]
    squares_ptr,  # [T, P] fp32, sums of squares of parts of each row; only with PARTS
    weight_ptr,  # [N, K]; with ACTIVATION [2 N, K], the gate's rows first
    bias_ptr,  # [N]; only with HAS_BIAS
    residual_ptr,  # [T, N]; only with HAS_RESIDUAL
    norm_ptr,  # [N]; only with FOR_NORM
    out_ptr,  # [T, N], out
    scaled_ptr,  # [T, N], out times norm, out; only with FOR_NORM
    out_squares_ptr,  # [T, N / BLOCK_N] fp32, out; only with FOR_NORM
    partial_ptr,  # [SPLITS, T, N] fp32, out; only with SPLITS > 1
    counters_ptr,  # [>= N / BLOCK_N] int32, zeros; only with SPLITS > 1
    num_rows,
    num_features,  # N
    x_stride,
    residual_stride,
    eps,
    K: tl.constexpr,
    PARTS: tl.constexpr,  # P, or 0 for an x that is not to be scaled
    ACTIVATION: tl.constexpr,  # "" for a plain product
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    FOR_NORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SLICES: tl.constexpr,  # of BLOCK_K, one a group of warps
    SPLITS: tl.constexpr,
    PREFETCH: tl.constexpr,  # features of every weight row to ask for before the wait
    EARLY: tl.constexpr,  # the last features, loaded before the wait and used at the end
    DEPENDENT: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION != ""
    SWAP: tl.constexpr = BLOCK_M < 16  # a product of mma.sync has 16 rows and 8 columns
    WIDTH: tl.constexpr = BLOCK_K // SLICES
    SHARE: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    EVEN: tl.constexpr = K % (SPLITS * BLOCK_K) == 0
    tl.static_assert(EARLY == 0 or (EVEN and SPLITS == 1 and not GATED and EARLY % BLOCK_K == 0))
    eps = tl.full([], eps, tl.float32)  # a Python float reaches torch.compile's kernels as fp64

    split = tl.program_id(1)
    first = split * SHARE
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_live = column < num_features
    weight_ptr += tl.minimum(column, num_features - 1).to(tl.int64) * K
    up_ptr = weight_ptr + num_features.to(tl.int64) * K
    if PREFETCH > 0:
        PER_LINE: tl.constexpr = LINE * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
        ahead = first + tl.arange(0, PREFETCH // PER_LINE) * PER_LINE
        prefetch_l2(weight_ptr[:, None] + ahead[None, :])
        if GATED:
            prefetch_l2(up_ptr[:, None] + ahead[None, :])
    if EARLY > 0:
        if SLICES == 1:
            early = K - EARLY + tl.arange(0, EARLY)
            early_weight = tl.load(weight_ptr[:, None] + early[None, :])
        else:
            EARLY_WIDTH: tl.constexpr = EARLY // SLICES
            early = tl.arange(0, SLICES)[:, None] * EARLY_WIDTH
            early = K - EARLY + early + tl.arange(0, EARLY_WIDTH)[None, :]
            early_weight = tl.load(weight_ptr[None, :, None] + early[:, None, :])
    row = tl.arange(0, BLOCK_M)
    row_live = row < num_rows
    place = row.to(tl.int64)[:, None] * num_features + column[None, :]
    mask = row_live[:, None] & column_live[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column_live, other=0.0)
    if FOR_NORM:
        norm = tl.load(norm_ptr + column, mask=column_live, other=0.0)
    after_predecessor(DEPENDENT)

    # What the end needs is asked for before the loop, so that nobody waits for it there.
    if HAS_RESIDUAL:
        residual_ptr += row.to(tl.int64)[:, None] * residual_stride + column[None, :]
        residual = tl.load(residual_ptr, mask=mask, other=0.0)
    if PARTS > 0:
        part = tl.arange(0, BLOCK_P)
        squares = tl.load(
            squares_ptr + row[:, None] * PARTS + part[None, :],
            mask=row_live[:, None] & (part < PARTS)[None, :],
            other=0.0,
        )

    x_ptr += row.to(tl.int64) * x_stride
    if SLICES == 1:
        inside = tl.arange(0, BLOCK_K)
    else:
        inside = tl.arange(0, SLICES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if SWAP:
        acc = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([SLICES, BLOCK_M, BLOCK_N], tl.float32)
    if SLICES == 1:
        acc = tl.reshape(acc, acc.shape[1:])
    acc_up = acc
    if EARLY > 0:
        if SLICES == 1:
            early_x = tl.load(x_ptr[:, None] + early[None, :], mask=row_live[:, None], other=0.0)
        else:
            early_x = tl.load(
                x_ptr[None, :, None] + early[:, None, :], mask=row_live[None, :, None], other=0.0
            )
    for start in range(first, first + SHARE - EARLY, BLOCK_K):
        k = start + inside
        # Dimensions: slice of K (with SLICES > 1), row or column, feature read.
        if SLICES == 1:
            x_at = x_ptr[:, None] + k[None, :]
            x_mask = row_live[:, None] & (k < K)[None, :]
            weight_at = weight_ptr[:, None] + k[None, :]
            up_at = up_ptr[:, None] + k[None, :]
            weight_mask = (k < K)[None, :]
        else:
            x_at = x_ptr[None, :, None] + k[:, None, :]
            x_mask = row_live[None, :, None] & (k < K)[:, None, :]
            weight_at = weight_ptr[None, :, None] + k[:, None, :]
            up_at = up_ptr[None, :, None] + k[:, None, :]
            weight_mask = (k < K)[:, None, :]
        x = tl.load(x_at, mask=x_mask, other=0.0)
        if EVEN:
            weight = tl.load(weight_at)
        else:
            weight = tl.load(weight_at, mask=weight_mask, other=0.0)
        acc = product(x, weight, acc, SLICES, SWAP, PRECISION, UPCAST)
        if GATED:
            if EVEN:
                up = tl.load(up_at)
            else:
                up = tl.load(up_at, mask=weight_mask, other=0.0)
            acc_up = product(x, up, acc_up, SLICES, SWAP, PRECISION, UPCAST)

    if EARLY > 0:
        acc = product(early_x, early_weight, acc, SLICES, SWAP, PRECISION, UPCAST)
    if SLICES > 1:
        acc = tl.sum(acc, axis=0)
        acc_up = tl.sum(acc_up, axis=0)
    if SWAP:
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
    if SPLITS > 1:
        size = num_rows.to(tl.int64) * num_features
        tl.store(partial_ptr + split * size + place, acc, mask=mask)
        if not is_last(counters_ptr + tl.program_id(0), SPLITS):
            return
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for other in tl.static_range(SPLITS):
            at = partial_ptr + other * size + place
            acc += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    if PARTS > 0:
        factor = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
        acc *= factor
        acc_up *= factor
    if HAS_BIAS:
        acc += bias.to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        acc += residual.to(tl.float32)
    if GATED:
        acc = activate(acc, ACTIVATION) * acc_up
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, out, mask=mask)
    if FOR_NORM:
        # The norm is of the rounded values, as they will be read.
        wide = tl.where(mask, out.to(tl.float32), 0.0)
        scaled = (wide * norm.to(tl.float32)[None, :]).to(out.dtype)
        tl.store(scaled_ptr + place, scaled, mask=mask)
        at = row * tl.num_programs(0) + tl.program_id(0)
        tl.store(out_squares_ptr + at, tl.sum(wide * wide, axis=1), mask=row_live)


def few_rows_linear(
    x: Tensor,
    weight: Tensor,
    tiles: Tiles,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    activation: str = "",
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch. x [T, K], weight [N, K] (or [2N, K] with an activation), squares [T, P] of x.

    Returns [T, N], which is `into` where given; with `norm_weight` [N] also the same times it, and
    squares [T, N / block_n].
    """
    out, scaled, out_squares = linear_outputs(
        x,
        weight,
        tiles.block_n,
        squares=squares,
        bias=bias,
        activation=activation,
        residual=residual,
        norm_weight=norm_weight,
        into=into,
    )
    num_rows, width = x.shape
    num_features = out.shape[1]
    blocks = triton.cdiv(num_features, tiles.block_n)
    assert num_rows <= tiles.block_m
    partial = counts = out
    if tiles.splits > 1:
        assert not activation and blocks <= COUNTERS
        partial = torch.empty((tiles.splits, *out.shape), dtype=torch.float32, device=x.device)
        counts = counters(x.device)
    parts = 0 if squares is None else squares.shape[1]
    # A request past the end of the weight would be none of ours.
    share = triton.cdiv(width, tiles.splits * tiles.block_k) * tiles.block_k
    prefetch = tiles.prefetch if tiles.prefetch <= width - share * (tiles.splits - 1) else 0
    dependent = dependent_launch(x)
    few_rows_linear_kernel[(blocks, tiles.splits)](
        x,
        x if squares is None else squares,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        x if norm_weight is None else norm_weight,
        out,
        scaled,
        out_squares,
        partial,
        counts,
        num_rows,
        num_features,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        float(eps),
        K=width,
        PARTS=parts,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        FOR_NORM=norm_weight is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        BLOCK_P=triton.next_power_of_2(max(parts, 1)),
        SLICES=tiles.slices,
        SPLITS=tiles.splits,
        PREFETCH=prefetch if dependent else 0,
        EARLY=tiles.early if tiles.splits == 1 and width % tiles.block_k == 0 else 0,
        DEPENDENT=dependent,
        PRECISION="ieee",
        # CPU tensors mean Triton's interpreter, whose dot of 16-bit operands is not to be trusted.
        UPCAST=not x.is_cuda,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **({"launch_pdl": True} if dependent else {}),
    )
    return out, scaled, out_squares
