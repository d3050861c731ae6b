"""Per-head norms, rotary embedding and cache writes for the heads that the projection computes.

Rotary embedding combines the first half of a head with the second (RoFormer, arXiv 2104.09864, in
transformers' layout), so functions take and return a head as its two halves. The kernel in
`decode_triton` calls these functions. If there are more queries than fit into its tile, `rope_kv`
launches a separate kernel before attention.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.attention.cache_triton import coded
from specdec_kernels.attention.call import LayerCache
from specdec_kernels.launch_triton import after_predecessor, dependence


@triton.jit
def normed(first, second, norm_ptr, half, eps, D: tl.constexpr):
    """Apply an RMS norm to fp32 rows [R, D]; rows are passed and returned as two halves."""
    live = half < D // 2
    norm_first = tl.load(norm_ptr + half, mask=live, other=0.0).to(tl.float32)
    norm_second = tl.load(norm_ptr + D // 2 + half, mask=live, other=0.0).to(tl.float32)
    mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / D
    factor = tl.rsqrt(mean + eps)[:, None]
    return first * factor * norm_first[None, :], second * factor * norm_second[None, :]


@triton.jit
def rotated(head, turn, norm_ptr, half, eps, D: tl.constexpr):
    """Apply an RMS norm to heads [R, D] unless `norm_ptr` is None, then rotate them, in fp32.

    head: the two halves of every head. turn: the cosines and sines, from `load_turn`. Returns the
    two halves, in the dtype of `head`.
    """
    first, second = head
    cos, sin = turn
    dtype = first.dtype
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    cos = cos.to(tl.float32)
    sin = sin.to(tl.float32)
    if norm_ptr is not None:
        first, second = normed(first, second, norm_ptr, half, eps, D)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def load_turn(cos_ptr, sin_ptr, token, half, mask, rope_stride):
    """Load the cosines and sines [R, D / 2] of tokens [R]. A kernel may do so while its predecessor
    still runs, so cosines and sines must be complete before the predecessor starts."""
    at = token[:, None] * rope_stride + half[None, :]
    cos = tl.load(cos_ptr + at, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + at, mask=mask, other=0.0)
    return cos, sin


@triton.jit
def load_queries(qkv_ptr, token, head, half, mask, qkv_stride, D: tl.constexpr):
    """Load the query of each (token, head) pair from the projection, as halves [R, D / 2]."""
    at = qkv_ptr + (token * qkv_stride + head * D)[:, None] + half[None, :]
    first = tl.load(at, mask=mask, other=0.0)
    second = tl.load(at + D // 2, mask=mask, other=0.0)
    return first, second


@triton.jit
def load_heads(key_ptr, value_ptr, token, live, half, dim, qkv_stride, D: tl.constexpr):
    """Load new tokens' keys, as halves [N, D / 2], and values [N, D] from the projection."""
    at = token * qkv_stride
    mask = live[:, None] & (half < D // 2)[None, :]
    key_at = key_ptr + at[:, None] + half[None, :]
    first = tl.load(key_at, mask=mask, other=0.0)
    second = tl.load(key_at + D // 2, mask=mask, other=0.0)
    value_at = value_ptr + at[:, None] + dim[None, :]
    value = tl.load(value_at, mask=live[:, None] & (dim < D)[None, :], other=0.0)
    return (first, second), value


@triton.jit
def store_heads(
    cache,  # pointers to keys and values of one key head
    key,  # halves [N, D / 2]
    value,  # [N, D]
    slot,
    live,
    half,
    dim,
    FORM: tl.constexpr,
):
    """Store new tokens' rotated keys and values at their slots."""
    first, second = key
    mask = live[:, None] & (half < FORM.dim // 2)[None, :]
    slot = (slot * (FORM.kv_heads * FORM.dim))[:, None]
    to = cache[0] + slot + half[None, :]
    tl.store(to, first, mask=mask)
    tl.store(to + FORM.dim // 2, second, mask=mask)
    tl.store(cache[1] + slot + dim[None, :], value, mask=live[:, None] & (dim < FORM.dim)[None, :])


@triton.jit
def rope_kv_kernel(
    qkv_ptr,  # [T, (H + 2 Hkv) D]
    cos_ptr,  # [T, D]; both halves of a row are equal
    sin_ptr,  # [T, D]; both halves of a row are equal
    query_norm_ptr,  # [D], or None
    key_norm_ptr,  # [D], or None
    query_ptr,  # [T, H, D], out
    key_cache_ptr,  # [NB, BLOCK_SIZE, Hkv, D], out
    value_cache_ptr,  # [NB, BLOCK_SIZE, Hkv, D], out
    scales_ptr,  # [2, Hkv] fp32, or None
    slots_ptr,  # [T] int64
    eps,
    qkv_stride,
    rope_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    half = tl.arange(0, BLOCK_HALF)
    eps = tl.full([], eps, tl.float32)
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & (half < HALF)[None, :]
    after_predecessor(DEPENDENT)

    at = qkv_ptr + token * qkv_stride + (head * D)[:, None] + half[None, :]
    first = tl.load(at, mask=mask, other=0.0)
    dtype = first.dtype
    first = first.to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    # Norms apply to query and key heads only. Value heads are not rotated either, so they get a
    # cosine of 1 and a sine of 0 below.
    if query_norm_ptr is not None:
        one, two = normed(first, second, query_norm_ptr, half, eps, D)
        first = tl.where(is_query[:, None], one, first)
        second = tl.where(is_query[:, None], two, second)
    if key_norm_ptr is not None:
        one, two = normed(first, second, key_norm_ptr, half, eps, D)
        first = tl.where(is_key[:, None], one, first)
        second = tl.where(is_key[:, None], two, second)
    cos = tl.load(cos_ptr + token * rope_stride + half, mask=half < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * rope_stride + half, mask=half < HALF, other=0.0)
    cos = tl.where(is_value[:, None], 1.0, cos.to(tl.float32)[None, :])
    sin = tl.where(is_value[:, None], 0.0, sin.to(tl.float32)[None, :])
    turned = (second * cos + first * sin).to(dtype)
    rotated = (first * cos - second * sin).to(dtype)

    slot = tl.load(slots_ptr + token)
    if HEADS > 0:
        to = query_ptr + (token * HEADS + head)[:, None] * D + half[None, :]
        tl.store(to, rotated, mask=mask & is_query[:, None])
        tl.store(to + HALF, turned, mask=mask & is_query[:, None])
    if scales_ptr is not None:
        scale = tl.load(scales_ptr + head - HEADS, mask=is_key | is_value, other=1.0)[:, None]
        rotated = coded(rotated, scale)
        turned = coded(turned, scale)
    to = key_cache_ptr + (slot * KV_HEADS + head - HEADS)[:, None] * D + half[None, :]
    tl.store(to, rotated, mask=mask & is_key[:, None])
    tl.store(to + HALF, turned, mask=mask & is_key[:, None])
    to = value_cache_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS)[:, None] * D + half[None, :]
    tl.store(to, rotated, mask=mask & is_value[:, None])
    tl.store(to + HALF, turned, mask=mask & is_value[:, None])


def rope_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slots: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Apply norms and rotation to queries and keys, store keys and values in the cache, and return
    the queries [T, H, D]."""
    num_tokens, width = qkv.shape
    kv_heads, head_dim = cache.keys.shape[2:]
    assert cache.is_sound
    heads = width // head_dim - 2 * kv_heads
    query = torch.empty((num_tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    block_heads = 8
    rope_kv_kernel[(num_tokens, triton.cdiv(heads + 2 * kv_heads, block_heads))](
        *(qkv, cos, sin, query_norm, key_norm, query, *cache, slots),
        float(eps),
        qkv.stride(0),
        cos.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=block_heads,
        num_warps=2,
        **dependence(qkv),
    )
    return query


def write_kv_turned_triton(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slots: Tensor,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """See `ops.write_kv_turned`."""
    num_tokens, head_dim = cos.shape
    assert kv.shape == (num_tokens, 2 * cache.keys.shape[2] * head_dim)
    assert slots.shape == (num_tokens,)
    rope_kv(kv, cos, sin, cache, slots, None, key_norm, eps)
