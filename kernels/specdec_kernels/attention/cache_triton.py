"""Kernels for the paged KV cache.

`slot_mapping_kernel` computes the cache slot of every token, BLOCK tokens per program.
`write_kv_kernel` writes keys and values into the cache, one token per program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.attention.call import LayerCache
from specdec_kernels.launch_triton import launch_options

BLOCK = 256
FP8_MAX = tl.constexpr(448.0)


@triton.jit
def coded(x, scale):
    """Divide values by `scale` and round them to e4m3 as `call.Side.coded` does, but return fp32.

    This rounds with fp32 arithmetic instead of a cast to fp8 and back. A cast would give wrong
    results, because of a bug in ptxas 12.8: it reads a converted value from a wrong register if the
    value is also packed into a word.
    """
    x = tl.div_rn(x.to(tl.float32), scale)
    x = tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    # e4m3 has three mantissa bits: its values are spaced by 1/8 of the largest power of two that
    # does not exceed |x|, and by 2^-9 where |x| < 2^-6. Adding 1.5 * 2^23 times this step makes
    # fp32 round x to a whole number of steps, ties to even; the subtraction leaves the rounded x.
    power = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    large = (power + (20 << 23) + (1 << 22)).to(tl.float32, bitcast=True)
    return x + large - large


@triton.jit
def row_of(start_ptr, token, num_rows, STEPS: tl.constexpr):
    """Return the block-table row to which a token belongs: the largest b with start[b] <= token.

    The search is a bisection and needs 2**STEPS >= num_rows.
    """
    low = token * 0
    high = low + num_rows - 1
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        found = tl.load(start_ptr + middle) <= token
        low = tl.where(found, middle, low)
        high = tl.where(found, high, middle - 1)
    return low


# Counts change from pass to pass, so do not specialise on them: each variant would take seconds to
# compile.
@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_columns", "table_stride"])
def slot_mapping_kernel(
    block_tables_ptr,  # [B, MB] int32
    out_start_ptr,  # [B + 1] int32
    positions_ptr,  # [T] int64
    slots_ptr,  # [T] int64, out
    num_tokens,
    num_rows,
    num_columns,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = place < num_tokens
    row = row_of(out_start_ptr, place, num_rows, STEPS)
    position = tl.load(positions_ptr + place, mask=live, other=0)
    column = tl.maximum(position // BLOCK_SIZE, 0)
    keep = (column < num_columns) & (place < tl.load(out_start_ptr + num_rows))
    entry = block_tables_ptr + row.to(tl.int64) * table_stride + column
    block = tl.load(entry, mask=live & keep, other=0).to(tl.int64)
    tl.store(slots_ptr + place, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=live)


def slot_mapping_triton(
    block_tables: Tensor, out_start: Tensor, positions: Tensor, block_size: int
) -> Tensor:
    """See `ops.slot_mapping`."""
    (num_rows, num_columns), (num_tokens,) = block_tables.shape, positions.shape
    assert out_start.shape == (num_rows + 1,)
    slots = torch.empty(num_tokens, dtype=torch.int64, device=positions.device)
    slot_mapping_kernel[(triton.cdiv(num_tokens, BLOCK),)](
        *(block_tables, out_start, positions, slots),
        *(num_tokens, num_rows, num_columns, block_tables.stride(0)),
        BLOCK_SIZE=block_size,
        STEPS=num_rows.bit_length(),
        BLOCK=BLOCK,
        **launch_options(),
    )
    return slots


@triton.jit
def write_kv_kernel(
    key_ptr,  # [T, Hkv, DK]
    value_ptr,  # [T, Hkv, DV]
    key_cache_ptr,  # [NB, BS, Hkv, DK]
    value_cache_ptr,  # [NB, BS, Hkv, DV]
    scales_ptr,  # [2, Hkv] fp32, or None
    slots_ptr,  # [T] int64
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    lane = tl.arange(0, BLOCK_K)
    head = lane // DK
    dim = lane % DK
    key = tl.load(
        key_ptr + token * key_stride_t + head * key_stride_h + dim, mask=lane < HEADS * DK, other=0
    )
    if scales_ptr is not None:
        scale = tl.load(scales_ptr + head, mask=head < HEADS, other=1.0)
        key = coded(key, scale)
    tl.store(key_cache_ptr + slot * (HEADS * DK) + lane, key, mask=lane < HEADS * DK)
    lane = tl.arange(0, BLOCK_V)
    head = lane // DV
    dim = lane % DV
    value = tl.load(
        value_ptr + token * value_stride_t + head * value_stride_h + dim,
        mask=lane < HEADS * DV,
        other=0,
    )
    if scales_ptr is not None:
        scale = tl.load(scales_ptr + HEADS + head, mask=head < HEADS, other=1.0)
        value = coded(value, scale)
    tl.store(value_cache_ptr + slot * (HEADS * DV) + lane, value, mask=lane < HEADS * DV)


def write_kv_triton(key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """See `ops.write_kv`."""
    (num_tokens, heads, dk), dv = key.shape, value.shape[2]
    assert value.shape[:2] == key.shape[:2]
    assert cache.keys.shape[2:] == key.shape[1:] and cache.values.shape[2:] == value.shape[1:]
    assert cache.is_sound and slots.shape == (num_tokens,)
    assert key.stride(-1) == value.stride(-1) == 1
    write_kv_kernel[(num_tokens,)](
        *(key, value, *cache, slots),
        *key.stride()[:2],
        *value.stride()[:2],
        HEADS=heads,
        DK=dk,
        DV=dv,
        BLOCK_K=triton.next_power_of_2(heads * dk),
        BLOCK_V=triton.next_power_of_2(heads * dv),
        **launch_options(),
    )
