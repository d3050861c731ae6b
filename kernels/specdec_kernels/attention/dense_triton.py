"""Attention for a prompt chunk over contiguous keys and values, which TMA loads.

A program processes one tile of queries for one key head; a row is a pair of a query token and a
query head. With TMA, the warps that multiply neither compute addresses nor hold loaded data in
registers, so tiles can be larger than in `paged_triton`. Programs with the most keys start first;
otherwise the GPU would wait for a few of them at the end.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specdec_kernels.attention.softmax_triton import LOG2E
from specdec_kernels.launch_triton import INTERPRETED, launch_options


class DenseTiles(NamedTuple):
    """Launch configuration of `dense_attention_kernel`."""

    block_m: int  # rows of a tile: query tokens times query heads per key head
    block_n: int  # keys per step
    num_warps: int
    num_stages: int


# The fastest tiles on an H200, by head dimension, for the number of heads of an 8B model
# (measured by scripts/bench/chunks.py).
TILES = {64: DenseTiles(64, 64, 4, 2), 128: DenseTiles(128, 64, 8, 3)}


@triton.jit
def added(
    softmax,  # state: row maxima times log2(e) [M], sums of weights [M], weighted values [M, D]
    query,  # [M, D]
    key,  # [N, D]
    value,  # [N, D]
    visible,  # [M, N]; only if MASKED
    unit,
    MASKED: tl.constexpr,
):
    """Add a tile of keys and values to the online softmax, and return its new state.

    unit: the scale of the scores times log2(e), which turns scores into exponents for exp2.

    In the first tile, every row must see a key. Otherwise its maximum would be -inf, and its result
    NaN.
    """
    row_max, row_sum, acc = softmax
    if INTERPRETED:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
    scores = tl.dot(query, key.T)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * unit)
    weights = tl.exp2(scores * unit - new_max[:, None])
    keep = tl.exp2(row_max - new_max)
    row_sum = row_sum * keep + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(value.dtype), value, acc * keep[:, None])
    return new_max, row_sum, acc


@triton.jit(do_not_specialize=["num_queries", "context"])
def dense_attention_kernel(
    query_ptr,  # [L, H, D]
    key_desc,  # descriptor of [C, Hkv D] that loads tiles [BLOCK_N, D]
    value_desc,  # descriptor of [C, Hkv D] that loads tiles [BLOCK_N, D]
    out_ptr,  # [L, H, D], out
    num_queries,
    context,
    scale,
    query_stride,
    out_stride,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    TILE: tl.constexpr = BLOCK_M // GROUP  # query tokens per program
    kv_head = tl.program_id(0)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * TILE
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, D)
    token = first + row // GROUP
    live = (row < TILE * GROUP) & (token < num_queries)
    inside = ((kv_head * GROUP + row % GROUP) * D)[:, None] + dim[None, :]
    token_at = token.to(tl.int64)[:, None]
    query = tl.load(query_ptr + token_at * query_stride + inside, mask=live[:, None], other=0.0)
    if INTERPRETED:
        query = query.to(tl.float32)
    older = context - num_queries
    unit = tl.full([], scale, tl.float32) * LOG2E

    softmax = (
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, D], tl.float32),
    )
    whole = (older + first + 1) // BLOCK_N * BLOCK_N  # every query sees the keys [0, whole)
    for start in range(0, whole, BLOCK_N):
        key = key_desc.load([start, kv_head * D])
        value = value_desc.load([start, kv_head * D])
        softmax = added(softmax, query, key, value, None, unit, False)
    for start in range(whole, tl.minimum(context, older + first + TILE), BLOCK_N):
        key = key_desc.load([start, kv_head * D])
        value = value_desc.load([start, kv_head * D])
        position = start + tl.arange(0, BLOCK_N)
        visible = position[None, :] <= (older + token)[:, None]
        softmax = added(softmax, query, key, value, visible, unit, True)
    _, row_sum, acc = softmax
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token_at * out_stride + inside, out, mask=live[:, None])


def dense_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    out: Tensor,
    tiles: DenseTiles | None = None,
) -> None:
    """See `reference.dense_attention`; `tiles` overrides the launch configuration."""
    num_queries, heads, dim = query.shape
    context, kv_heads, _ = key.shape
    group = heads // kv_heads
    tiles = tiles or TILES[dim]
    assert value.shape == key.shape and out.shape == query.shape and query.dtype.itemsize == 2
    assert query.stride()[1:] == out.stride()[1:] == (dim, 1) and heads == group * kv_heads
    assert group <= tiles.block_m and num_queries <= context
    flat = [x.view(context, kv_heads * dim) for x in (key, value)]
    key_desc, value_desc = (TensorDescriptor.from_tensor(x, [tiles.block_n, dim]) for x in flat)
    dense_attention_kernel[(kv_heads, triton.cdiv(num_queries, tiles.block_m // group))](
        *(query, key_desc, value_desc, out, num_queries, context, float(scale)),
        *(query.stride(0), out.stride(0)),
        GROUP=group,
        D=dim,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(),
    )
