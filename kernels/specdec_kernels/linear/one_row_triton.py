"""A product of one row with norm, gate, bias and residual, for weights that fit into registers.

A program loads all of its rows of the weight at once, before it waits for its predecessor, and
needs no shared memory for them. So programs fit beside those of the preceding kernel, and memory
stays busy while that kernel ends, which decides the time of layers as small as a draft's. Sums are
of plain multiplications: one row gives the tensor cores nothing to do.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import after_predecessor, options_of
from specdec_kernels.linear.fused import Fused, prepared
from specdec_kernels.linear.norm_triton import activate
from specdec_kernels.linear.tiles import RowTiles


@triton.jit
def chunks_of(rows_ptr, K: tl.constexpr, CHUNK: tl.constexpr, EVICTION: tl.constexpr):
    """Rows of K numbers at pointers [N, 1] as tiles [N, CHUNK], the last padded with zeros."""
    tiles = ()
    for start in tl.static_range(0, K, CHUNK):
        k = start + tl.arange(0, CHUNK)[None, :]
        if start + CHUNK > K:
            tile = tl.load(rows_ptr + k, mask=k < K, other=0.0, eviction_policy=EVICTION)
        else:
            tile = tl.load(rows_ptr + k, eviction_policy=EVICTION)
        tiles += (tile,)
    return tiles


@triton.jit
def dot_products(weight, x, N: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr):
    """[N] fp32 from tiles [N, CHUNK] and [1, CHUNK]. Threads exchange sums once, at the end."""
    LANE: tl.constexpr = 128 // weight[0].dtype.primitive_bitwidth  # numbers of a thread's load
    sums = tl.zeros([N, CHUNK // LANE], tl.float32)
    for chunk in tl.static_range((K + CHUNK - 1) // CHUNK):
        products = weight[chunk].to(tl.float32) * x[chunk].to(tl.float32)
        sums += tl.sum(tl.reshape(products, [N, CHUNK // LANE, LANE]), axis=2)
    return tl.sum(sums, axis=1)


@triton.jit
def one_row_linear_kernel(
    x_ptr,  # [K]
    squares_ptr,  # [P] fp32, sums of squares of parts of the row; only with PARTS
    weight_ptr,  # [N, K]; with ACTIVATION [2 N, K], the gate's rows first
    bias_ptr,  # [N], or None
    residual_ptr,  # [N], or None
    norm_ptr,  # [N], or None
    out_ptr,  # [N], out
    scaled_ptr,  # [N], out times norm, out; only with norm
    out_squares_ptr,  # [N / BLOCK_N] fp32, out; only with norm
    num_features,  # N
    eps,
    K: tl.constexpr,
    PARTS: tl.constexpr,  # P, or 0 for an x that is not to be scaled
    ACTIVATION: tl.constexpr,  # "" for a plain product
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION != ""
    eps = tl.full([], eps, tl.float32)  # a Python float reaches torch.compile's kernels as fp64
    column = tl.program_id(0) * TILES.block_n + tl.arange(0, TILES.block_n)
    live = column < num_features
    rows_ptr = weight_ptr + (tl.minimum(column, num_features - 1).to(tl.int64) * K)[:, None]
    # A weight is not read again before the next pass, so it is the first to leave the L2 cache.
    weight = chunks_of(rows_ptr, K, TILES.chunk, "evict_first")
    if GATED:
        up = chunks_of(rows_ptr + num_features.to(tl.int64) * K, K, TILES.chunk, "evict_first")
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=live, other=0.0)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=live, other=0.0)
    after_predecessor(DEPENDENT)

    x = chunks_of(x_ptr + tl.zeros([1, 1], tl.int32), K, TILES.chunk, "")
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + column, mask=live, other=0.0)
    if PARTS > 0:
        part = tl.arange(0, BLOCK_P)
        squares = tl.load(squares_ptr + part, mask=part < PARTS, other=0.0)
    acc = dot_products(weight, x, TILES.block_n, K, TILES.chunk)
    if PARTS > 0:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        acc *= factor
    if bias_ptr is not None:
        acc += bias.to(tl.float32)
    if residual_ptr is not None:
        acc += residual.to(tl.float32)
    if GATED:
        acc_up = dot_products(up, x, TILES.block_n, K, TILES.chunk)
        if PARTS > 0:
            acc_up *= factor
        acc = activate(acc, ACTIVATION) * acc_up
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + column, out, mask=live)
    if norm_ptr is not None:
        # The norm uses the rounded values, as the next kernel reads them.
        wide = tl.where(live, out.to(tl.float32), 0.0)
        tl.store(scaled_ptr + column, (wide * norm.to(tl.float32)).to(out.dtype), mask=live)
        tl.store(out_squares_ptr + tl.program_id(0), tl.sum(wide * wide, axis=0))


def one_row_linear(
    x: Tensor, weight: Tensor, tiles: RowTiles, **fused: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel for x [1, K]; `fused` as in `Fused`, results as in `Launch`."""
    assert x.shape[0] == 1
    operands, constants, results = prepared(x, weight, tiles.block_n, Fused(**fused))
    num_features = results[0].shape[1]
    one_row_linear_kernel[(triton.cdiv(num_features, tiles.block_n),)](
        *(*operands, num_features, float(fused.get("eps", 0.0))),
        TILES=tiles,
        **constants | options_of(tiles),
    )
    return results
