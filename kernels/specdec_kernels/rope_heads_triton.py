"""Heads of the projection: per-head norm, rotary embedding, and a new token's place in the cache.

Rotary embedding turns the first half of a head against the second (RoFormer, arXiv 2104.09864, as
transformers arranges it), so heads are loaded and handed on as halves.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import triton
import triton.language as tl


@triton.jit
def normed(first, second, norm_ptr, half, eps, D: tl.constexpr):
    """RMS norm of rows [R, D] of fp32, given as halves."""
    live = half < D // 2
    norm_first = tl.load(norm_ptr + half, mask=live, other=0.0).to(tl.float32)
    norm_second = tl.load(norm_ptr + D // 2 + half, mask=live, other=0.0).to(tl.float32)
    mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / D
    factor = tl.rsqrt(mean + eps)[:, None]
    return first * factor * norm_first[None, :], second * factor * norm_second[None, :]


@triton.jit
def rotated(head, turn, norm_ptr, half, eps, D: tl.constexpr, HAS_NORM: tl.constexpr):
    """Heads [R, D] as halves, after their norm and rotation in fp32; turn: cosines and sines."""
    first, second = head
    cos, sin = turn
    dtype = first.dtype
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    cos = cos.to(tl.float32)
    sin = sin.to(tl.float32)
    if HAS_NORM:
        first, second = normed(first, second, norm_ptr, half, eps, D)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def load_turn(cos_ptr, sin_ptr, token, half, mask, rope_stride):
    """Cosines and sines [R, D / 2] of the tokens [R], which are there before a pass."""
    at = token[:, None] * rope_stride + half[None, :]
    cos = tl.load(cos_ptr + at, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + at, mask=mask, other=0.0)
    return cos, sin


@triton.jit
def load_queries(qkv_ptr, token, head, half, mask, qkv_stride, D: tl.constexpr):
    """Query heads as halves [R, D / 2], of tokens [R] each one head [R], from the projection."""
    at = qkv_ptr + (token * qkv_stride + head * D)[:, None] + half[None, :]
    first = tl.load(at, mask=mask, other=0.0)
    second = tl.load(at + D // 2, mask=mask, other=0.0)
    return first, second


@triton.jit
def load_heads(key_ptr, value_ptr, token, live, half, dim, qkv_stride, D: tl.constexpr):
    """Keys as halves [N, D / 2] and values [N, D] of new tokens, from the projection."""
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
    key_cache,  # of one key head: pointer, and strides of blocks and of slots in them
    value_cache,
    key,  # halves [N, D / 2]
    value,  # [N, D]
    slot,
    live,
    half,
    dim,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Keys, turned, and values of new tokens to their slots."""
    first, second = key
    mask = live[:, None] & (half < D // 2)[None, :]
    key_ptr, key_stride_b, key_stride_s = key_cache
    to = slot // BLOCK_SIZE * key_stride_b + slot % BLOCK_SIZE * key_stride_s
    to = key_ptr + to[:, None] + half[None, :]
    tl.store(to, first, mask=mask)
    tl.store(to + D // 2, second, mask=mask)
    value_ptr, value_stride_b, value_stride_s = value_cache
    to = slot // BLOCK_SIZE * value_stride_b + slot % BLOCK_SIZE * value_stride_s
    to = value_ptr + to[:, None] + dim[None, :]
    tl.store(to, value, mask=live[:, None] & (dim < D)[None, :])
