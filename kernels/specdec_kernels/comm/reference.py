"""Memory of the host through which captured passes get their inputs and tell their tokens.

A graph's addresses stay, and the host prepares a pass while the one before runs. So there are two
pieces of each, which passes use in turn. The device counts the passes itself: the host queues no
copy, and no event. On CUDA the pieces are pinned, which kernels can read and write.
"""

from torch import Tensor

from specdec_kernels.dispatch import kernel


@kernel("specdec_kernels.comm.staging_triton:fetch_staged_triton")
def fetch_staged(words: Tensor, staged: Tensor, passes: Tensor) -> None:
    """Bring what the host has written for this pass.

    Args:
        words: [N] int32, written in place.
        staged: [2, N] int32 on the host, pinned for CUDA.
        passes: [1] int32, passes so far; its remainder by 2 is the piece that is read.
    """
    words.copy_(staged[int(passes) % 2])


@kernel("specdec_kernels.comm.staging_triton:tell_tokens_triton")
def tell_tokens(passes: Tensor, tokens: Tensor | None, told: Tensor, ended: Tensor) -> None:
    """End a pass: write its tokens for the host, and count it.

    Args:
        passes: [1] int32, passes so far, written in place.
        tokens: [M] int64, contiguous; None for none.
        told: [2, B] int64 on the host, pinned for CUDA, B no less than M. The piece that
            `fetch_staged` reads is written in place.
        ended: [1] int32 on the host, pinned for CUDA, written in place: the new count.
    """
    if tokens is not None:
        told[int(passes) % 2, : len(tokens)] = tokens
    passes += 1
    ended.copy_(passes)
