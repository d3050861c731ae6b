"""Input and output of captured passes, through host memory (pinned on CUDA). There are two buffers
for each direction. Passes with an even number use one, passes with an odd number the other."""

from torch import Tensor

from specdec_kernels.dispatch import kernel


@kernel("specdec_kernels.comm.staging_triton:fetch_staged_triton")
def fetch_staged(words: Tensor, staged: Tensor, passes: Tensor) -> None:
    """Copy this pass's inputs from the host to `words`, [N] int32.

    staged: [2, N] int32, two buffers in host memory. passes: [1] int32, the number of passes so
    far; an even number reads the first buffer, an odd number the second.
    """
    words.copy_(staged[int(passes) % 2])


@kernel("specdec_kernels.comm.staging_triton:tell_tokens_triton")
def tell_tokens(passes: Tensor, tokens: Tensor | None, told: Tensor, ended: Tensor) -> None:
    """End a pass: write its tokens to the host, and count the pass.

    passes: [1] int32, the number of passes so far; raised by one. tokens: [M] int64, or None.
    told: [2, B] int64 with B at least M, two buffers in host memory, chosen as in `fetch_staged`.
    ended: [1] int32 in host memory, gets the new count.
    """
    if tokens is not None:
        told[int(passes) % 2, : len(tokens)] = tokens
    passes += 1
    ended.copy_(passes)
