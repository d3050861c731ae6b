"""What kernels that read other GPUs' memory share: flags, and addresses."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import triton
import triton.language as tl


@triton.jit
def read_flags(flags, INTERPRETED: tl.constexpr):
    """int32 counters at addresses [SIZE], and all that their writers wrote before."""
    if INTERPRETED:
        found = tl.load(flags)
    else:
        found = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.s32 $0, [$1];",
            "=r,l",
            [flags.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return found


@triton.jit
def part_of(addresses_ptr, rank, like_ptr):
    """Where a rank's parts begin, as a pointer to numbers of `like_ptr`'s type."""
    found = tl.load(addresses_ptr + rank).to(tl.pointer_type(like_ptr.dtype.element_ty))
    return tl.multiple_of(found, 16)  # without it two bytes are loaded at a time
