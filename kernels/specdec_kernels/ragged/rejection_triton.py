"""Rejection sampling of drafted tokens over probabilities: two Triton kernels.

The vocabulary is cut into chunks. The first kernel sums p and the residual of each chunk, all
chunks at once. The second finds the chunk of the inverse CDF and scans that one alone. Every
program computes the acceptances itself, which is cheaper than a third kernel.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import launch_options
from specdec_kernels.sampling.logits_triton import first_above

MAX_CHUNK = 4096


@triton.jit
def count_accepted(
    row,
    draft_tokens_ptr,
    lens_ptr,
    draft_probs_ptr,
    target_probs_ptr,
    accept_noise_ptr,
    tokens_stride,
    draft_stride_b,
    draft_stride_k,
    target_stride_b,
    target_stride_k,
    accept_stride,
    BLOCK_K: tl.constexpr,
):
    """Number of leading draft tokens accepted, and number drafted, of one row."""
    length = tl.load(lens_ptr + row)
    place = tl.arange(0, BLOCK_K)
    drafted = place < length
    token = tl.load(draft_tokens_ptr + row * tokens_stride + place, mask=drafted, other=0)
    q = tl.load(
        draft_probs_ptr + row * draft_stride_b + place * draft_stride_k + token,
        mask=drafted,
        other=0.0,
    )
    p = tl.load(
        target_probs_ptr + row * target_stride_b + place * target_stride_k + token,
        mask=drafted,
        other=0.0,
    )
    noise = tl.load(accept_noise_ptr + row * accept_stride + place, mask=drafted, other=0.0)
    stays = drafted & (noise * q < p)
    accepted = tl.min(tl.where(stays, BLOCK_K, place), axis=0)
    return tl.minimum(accepted, length), length


@triton.jit
def draw_weights(p_ptr, q_ptr, column, p_end, q_end):
    """max(p - q, 0) over `column`, with p read before `p_end` and q, elsewhere 0, before `q_end`.

    q_end = 0 makes the weights p itself. A NaN stays one, so that a sum over it is not positive.
    """
    p = tl.load(p_ptr + column, mask=column < p_end, other=0.0)
    q = tl.load(q_ptr + column, mask=column < q_end, other=0.0)
    return tl.where(p - q <= 0, 0.0, p - q)


@triton.jit
def chunk_sums_kernel(
    draft_tokens_ptr,  # [B, K] int64
    lens_ptr,  # [B] int32
    draft_probs_ptr,  # [B, K, V] fp32
    target_probs_ptr,  # [B, K + 1, V] fp32
    accept_noise_ptr,  # [B, K] fp32
    p_sums_ptr,  # [B, CHUNKS] fp32, out
    residual_sums_ptr,  # [B, CHUNKS] fp32, out
    tokens_stride,
    draft_stride_b,
    draft_stride_k,
    target_stride_b,
    target_stride_k,
    accept_stride,
    vocabulary,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    accepted = 0
    length = 0
    if K > 0:
        accepted, length = count_accepted(
            row,
            draft_tokens_ptr,
            lens_ptr,
            draft_probs_ptr,
            target_probs_ptr,
            accept_noise_ptr,
            tokens_stride,
            draft_stride_b,
            draft_stride_k,
            target_stride_b,
            target_stride_k,
            accept_stride,
            BLOCK_K,
        )
    p_base = target_probs_ptr + row * target_stride_b

    # NaN spoils the sum of p: the second kernel needs no flag of its own.
    p_sum = 0.0
    for place in range(K + 1):
        end = tl.where(place <= length, vocabulary, 0)
        p = tl.load(p_base + place * target_stride_k + column, mask=column < end, other=0.0)
        total = tl.sum(p, axis=0)
        p_sum += tl.where((place == accepted) | (total != total), total, 0.0)

    residual_sum = 0.0
    if K > 0:
        q_ptr = draft_probs_ptr + row * draft_stride_b + accepted * draft_stride_k
        end = tl.where(accepted < length, vocabulary, 0)
        residual = draw_weights(p_base + accepted * target_stride_k, q_ptr, column, end, end)
        residual_sum += tl.sum(residual, axis=0)
    tl.store(p_sums_ptr + row * CHUNKS + chunk, p_sum)
    tl.store(residual_sums_ptr + row * CHUNKS + chunk, residual_sum)


@triton.jit
def draw_kernel(
    draft_tokens_ptr,  # [B, K] int64
    lens_ptr,  # [B] int32
    draft_probs_ptr,  # [B, K, V] fp32
    target_probs_ptr,  # [B, K + 1, V] fp32
    accept_noise_ptr,  # [B, K] fp32
    sample_noise_ptr,  # [B, K + 1] fp32
    p_sums_ptr,  # [B, CHUNKS] fp32
    residual_sums_ptr,  # [B, CHUNKS] fp32
    tokens_ptr,  # [B, K + 1] int64, out
    accepted_ptr,  # [B] int32, out
    tokens_stride,
    draft_stride_b,
    draft_stride_k,
    target_stride_b,
    target_stride_k,
    accept_stride,
    sample_stride,
    vocabulary,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    accepted = 0
    if K > 0:
        accepted, _ = count_accepted(
            row,
            draft_tokens_ptr,
            lens_ptr,
            draft_probs_ptr,
            target_probs_ptr,
            accept_noise_ptr,
            tokens_stride,
            draft_stride_b,
            draft_stride_k,
            target_stride_b,
            target_stride_k,
            accept_stride,
            BLOCK_K,
        )

    chunk = tl.arange(0, BLOCK_CHUNKS)
    here = chunk < CHUNKS
    p_sums = tl.load(p_sums_ptr + row * CHUNKS + chunk, mask=here, other=0.0)
    residual_sums = tl.load(residual_sums_ptr + row * CHUNKS + chunk, mask=here, other=0.0)
    p_total = tl.sum(p_sums, axis=0)
    void = p_total != p_total
    from_residual = tl.sum(residual_sums, axis=0) > 0
    sums = tl.where(from_residual, residual_sums, p_sums)
    noise = tl.load(sample_noise_ptr + row * sample_stride + accepted)
    threshold = noise * tl.sum(sums, axis=0)
    drawn = first_above(sums, 0.0, threshold, chunk, CHUNKS)
    before = tl.sum(tl.where(chunk < drawn, sums, 0.0), axis=0)

    column = drawn * CHUNK + tl.arange(0, CHUNK)
    p_ptr = target_probs_ptr + row * target_stride_b + accepted * target_stride_k
    q_ptr = draft_probs_ptr + row * draft_stride_b + accepted * draft_stride_k
    q_end = tl.where(from_residual, vocabulary, 0)
    weights = draw_weights(p_ptr, q_ptr, column, vocabulary, q_end)
    token = first_above(weights, before, threshold, tl.arange(0, CHUNK), CHUNK)
    token = tl.minimum(drawn * CHUNK + token, vocabulary - 1)

    place = tl.arange(0, BLOCK_K)
    out = tl.where(place == accepted, token, -1).to(tl.int64)
    if K > 0:
        drafted = place < accepted
        draft = tl.load(draft_tokens_ptr + row * tokens_stride + place, mask=drafted, other=0)
        out = tl.where(drafted, draft, out)
    out = tl.where(void, -1, out)
    tl.store(tokens_ptr + row * (K + 1) + place, out, mask=place <= K)
    tl.store(accepted_ptr + row, tl.where(void, -1, accepted))


def rejection_sample_triton(
    draft_tokens: Tensor,
    lens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    accept_noise: Tensor,
    sample_noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `ops.rejection_sample`."""
    (rows, width), vocabulary = draft_tokens.shape, target_probs.shape[2]
    assert draft_probs.shape == (rows, width, vocabulary)
    assert target_probs.shape == (rows, width + 1, vocabulary)
    assert lens.shape == (rows,)
    assert accept_noise.shape == (rows, width) and sample_noise.shape == (rows, width + 1)
    assert target_probs.stride(2) == 1 and (width == 0 or draft_probs.stride(2) == 1)
    chunk = min(MAX_CHUNK, triton.next_power_of_2(vocabulary))
    chunks = triton.cdiv(vocabulary, chunk)
    device = target_probs.device
    sums = torch.empty((2, rows, chunks), dtype=torch.float32, device=device)
    tokens = torch.empty((rows, width + 1), dtype=torch.int64, device=device)
    accepted = torch.empty(rows, dtype=torch.int32, device=device)
    inputs = (draft_tokens, lens, draft_probs, target_probs, accept_noise)
    strides = (
        draft_tokens.stride(0),
        *draft_probs.stride()[:2],
        *target_probs.stride()[:2],
        accept_noise.stride(0),
    )
    block_k = triton.next_power_of_2(width + 1)
    chunk_sums_kernel[(rows, chunks)](
        *inputs,
        sums[0],
        sums[1],
        *strides,
        vocabulary,
        K=width,
        BLOCK_K=block_k,
        CHUNKS=chunks,
        CHUNK=chunk,
        **launch_options(),
    )
    draw_kernel[(rows,)](
        *inputs,
        sample_noise,
        sums[0],
        sums[1],
        tokens,
        accepted,
        *strides,
        sample_noise.stride(0),
        vocabulary,
        K=width,
        BLOCK_K=block_k,
        CHUNKS=chunks,
        BLOCK_CHUNKS=triton.next_power_of_2(chunks),
        CHUNK=chunk,
        **launch_options(),
    )
    return tokens, accepted


def sample_categorical_triton(probs: Tensor, noise: Tensor) -> Tensor:
    """See `ops.sample_categorical`: the case K = 0 of rejection sampling."""
    rows, vocabulary = probs.shape
    tokens, _ = rejection_sample_triton(
        noise.new_empty((rows, 0), dtype=torch.int64),
        noise.new_empty(rows, dtype=torch.int32),
        probs.new_empty((rows, 0, vocabulary)),
        probs[:, None],
        noise.new_empty((rows, 0)),
        noise[:, None],
    )
    return tokens[:, 0]
