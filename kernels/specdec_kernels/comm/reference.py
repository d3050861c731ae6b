"""Transfer of inputs and results between the host and forward passes captured in CUDA graphs.

Each direction has two buffers in host memory (pinned on CUDA), so that the host can use one while a
pass uses the other. Even-numbered passes use the first buffer, odd-numbered passes the second.
"""

from torch import Tensor

from specdec_kernels.dispatch import kernel


@kernel("specdec_kernels.comm.staging_triton:fetch_staged_triton")
def fetch_staged(words: Tensor, staged: Tensor, passes: Tensor) -> None:
    """Copy the inputs of this pass from host memory to `words`.

    words: [N] int32, out.
    staged: [2, N] int32, two buffers in host memory.
    passes: [1] int32, the number of passes completed so far. If it is even, the first buffer is
        read, otherwise the second.
    """
    words.copy_(staged[int(passes) % 2])


@kernel("specdec_kernels.comm.staging_triton:tell_tokens_triton")
def tell_tokens(passes: Tensor, tokens: Tensor | None, told: Tensor, ended: Tensor) -> None:
    """End a pass: write its tokens to host memory and increment the number of passes.

    passes: [1] int32, the number of passes completed before this one; incremented.
    tokens: [M] int64, or None if the pass has no tokens to report.
    told: [2, B] int64, two buffers in host memory, with B >= M. The tokens are written to the first
        buffer if `passes` is even, otherwise to the second.
    ended: [1] int32 in host memory; set to the new number of passes.
    """
    if tokens is not None:
        told[int(passes) % 2, : len(tokens)] = tokens
    passes += 1
    ended.copy_(passes)
