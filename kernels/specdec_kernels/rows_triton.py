"""Device helper shared by the kernels over packed tokens: which row does a token belong to."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import triton
import triton.language as tl


@triton.jit
def row_of(start_ptr, token, num_rows, STEPS: tl.constexpr):
    """Largest row b with start[b] <= token, by bisection; needs 2**STEPS >= num_rows."""
    low = token * 0
    high = low + num_rows - 1
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        found = tl.load(start_ptr + middle) <= token
        low = tl.where(found, middle, low)
        high = tl.where(found, high, middle - 1)
    return low
