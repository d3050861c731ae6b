"""Time stamps among kernels: one program that reads the device's clock.

Events cannot be read apart for each replay of a CUDA graph; a stamp in memory can.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import launch_options


@triton.jit
def stamp_kernel(
    out_ptr,  # [N] int64
    PLACE: tl.constexpr,
):
    tl.store(out_ptr + PLACE, tl.extra.cuda.globaltimer())


def stamp_triton(out: Tensor, place: int) -> None:
    """See `ops.stamp`."""
    stamp_kernel[(1,)](out, PLACE=place, num_warps=1, **launch_options())
