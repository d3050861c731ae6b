"""Kernels that begin and end a forward pass captured in a CUDA graph. The first reads the inputs of
the pass from host memory, and the last writes the tokens of the pass to host memory."""

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import launch_options


@triton.jit
def fetch_staged_kernel(
    words_ptr,  # [N] int32, out
    staged_ptr,  # [2, N] int32, in host memory
    passes_ptr,  # [1] int32
    num_words,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    piece = tl.load(passes_ptr) % 2
    # Bypass all caches: the host has written new values since this kernel last ran.
    word = tl.load(staged_ptr + piece * num_words + at, mask=at < num_words, cache_modifier=".cv")
    tl.store(words_ptr + at, word, mask=at < num_words)


@triton.jit
def tell_tokens_kernel(
    passes_ptr,  # [1] int32, incremented
    tokens_ptr,  # [M] int64, or None
    told_ptr,  # [2, B] int64, in host memory, out
    ended_ptr,  # [1] int32, in host memory, out
    num_tokens,
    num_rows,
    BLOCK: tl.constexpr,
):
    count = tl.load(passes_ptr)
    if tokens_ptr is not None:
        row = tl.arange(0, BLOCK)
        token = tl.load(tokens_ptr + row, mask=row < num_tokens)
        tl.store(told_ptr + count % 2 * num_rows + row, token, mask=row < num_tokens)
    tl.store(passes_ptr, count + 1)
    tl.store(ended_ptr, count + 1)


def fetch_staged_triton(words: Tensor, staged: Tensor, passes: Tensor) -> None:
    """See `ops.fetch_staged`."""
    (num_words,) = words.shape
    assert staged.shape == (2, num_words) and staged.is_contiguous() and words.is_contiguous()
    block = 1024  # 16 bytes per thread
    grid = (triton.cdiv(num_words, block),)
    fetch_staged_kernel[grid](
        *(words, staged, passes, num_words), BLOCK=block, num_warps=8, **launch_options()
    )


def tell_tokens_triton(passes: Tensor, tokens: Tensor | None, told: Tensor, ended: Tensor) -> None:
    """See `ops.tell_tokens`."""
    num_rows, num_tokens = told.shape[1], 0
    if tokens is not None:
        num_tokens = len(tokens)
        assert tokens.is_contiguous() and num_tokens <= num_rows
    assert told.is_contiguous()
    tell_tokens_kernel[(1,)](
        *(passes, tokens, told, ended, num_tokens, num_rows),
        BLOCK=triton.next_power_of_2(max(num_tokens, 1)),
        num_warps=1,
        **launch_options(),
    )
