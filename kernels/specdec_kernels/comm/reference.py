"""Host memory for captured passes, which read their inputs from it and write their tokens to it. It
has two buffers, pinned on CUDA, which alternate with the device's count of passes."""

from torch import Tensor

from specdec_kernels.dispatch import kernel


@kernel("specdec_kernels.comm.staging_triton:fetch_staged_triton")
def fetch_staged(words: Tensor, staged: Tensor, passes: Tensor) -> None:
    """Copy the host's inputs of this pass to `words`, [N] int32. staged: [2, N] int32, the host's.
    passes: [1] int32, the number of passes so far. Even and odd numbers read different pieces.
    """
    words.copy_(staged[int(passes) % 2])


@kernel("specdec_kernels.comm.staging_triton:tell_tokens_triton")
def tell_tokens(passes: Tensor, tokens: Tensor | None, told: Tensor, ended: Tensor) -> None:
    """End a pass: write its tokens, [M] int64 or None, for the host, and count it.

    passes: [1] int32, passes so far. told: [2, B] int64, the host's, with B at least M. The tokens
    go to the piece with the number that `fetch_staged` reads. ended: [1] int32, the host's; gets
    the new count.
    """
    if tokens is not None:
        told[int(passes) % 2, : len(tokens)] = tokens
    passes += 1
    ended.copy_(passes)
