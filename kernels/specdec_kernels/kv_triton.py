"""Writing keys and values into the paged KV cache: Triton kernel, one program a token."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import launch_options


@triton.jit
def write_kv_kernel(
    key_ptr,  # [T, Hkv, DK]
    value_ptr,  # [T, Hkv, DV]
    key_cache_ptr,  # [NB, BS, Hkv, DK]
    value_cache_ptr,  # [NB, BS, Hkv, DV]
    slots_ptr,  # [T] int64
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    key_cache_stride_b,
    key_cache_stride_s,
    key_cache_stride_h,
    value_cache_stride_b,
    value_cache_stride_s,
    value_cache_stride_h,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    block = slot // BLOCK_SIZE
    inside = slot % BLOCK_SIZE

    lane = tl.arange(0, BLOCK_K)
    head = lane // DK
    dim = lane % DK
    key = tl.load(
        key_ptr + token * key_stride_t + head * key_stride_h + dim, mask=lane < HEADS * DK, other=0
    )
    target = block * key_cache_stride_b + inside * key_cache_stride_s
    tl.store(key_cache_ptr + target + head * key_cache_stride_h + dim, key, mask=lane < HEADS * DK)

    lane = tl.arange(0, BLOCK_V)
    head = lane // DV
    dim = lane % DV
    value = tl.load(
        value_ptr + token * value_stride_t + head * value_stride_h + dim,
        mask=lane < HEADS * DV,
        other=0,
    )
    target = block * value_cache_stride_b + inside * value_cache_stride_s
    tl.store(
        value_cache_ptr + target + head * value_cache_stride_h + dim, value, mask=lane < HEADS * DV
    )


def write_kv_triton(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """See `ops.write_kv`."""
    (num_tokens, heads, dk), dv = key.shape, value.shape[2]
    block_size = key_cache.shape[1]
    assert value.shape[:2] == key.shape[:2]
    assert key_cache.shape[2:] == key.shape[1:] and value_cache.shape[2:] == value.shape[1:]
    assert value_cache.shape[:2] == key_cache.shape[:2] and slots.shape == (num_tokens,)
    assert all(t.stride(-1) == 1 for t in (key, value, key_cache, value_cache))
    write_kv_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        HEADS=heads,
        DK=dk,
        DV=dv,
        BLOCK_SIZE=block_size,
        BLOCK_K=triton.next_power_of_2(heads * dk),
        BLOCK_V=triton.next_power_of_2(heads * dv),
        **launch_options(),
    )
