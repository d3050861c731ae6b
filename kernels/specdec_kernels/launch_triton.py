"""Helpers for kernels that run in quick succession: dependent launches, prefetches, counters.

Programmatic dependent launch lets a kernel start while its predecessor in the stream still runs.
Before the kernel calls `after_predecessor`, it may touch only data that no recent kernel writes:
weights, and data that was complete when the predecessor began. The call waits until the predecessor
has completed and its writes are visible. In every kernel at least one program makes this call, so
no kernel can complete before its predecessor has. When the wait ends, the predecessor's own
predecessor has therefore completed too. A program without work may return before the call, which
frees its multiprocessor for the successor.

After the call, kernels are ordered as in an ordinary stream, and memory may be reused. The
successor may start only after the wait, so at most one kernel runs ahead. A kernel may therefore
read, before its own wait, everything that was written by kernels before its predecessor.

The sums of `comm` are an exception: they may run beside the matmul before them, and let their
successor start meanwhile (`beside_predecessor`). So a sum writes only memory that was allocated
before the matmul was launched, and the successor must not read the matmul's output before its own
wait. No successor does, because that output is only words for the sum.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.gpu import gpu_of

COUNTERS = 1 << 16
EPOCHS = 1 << 14
# True if kernels run in Triton's interpreter. It runs one program at a time and does not support
# inline assembly, and its 16-bit matmuls are unreliable.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_kept: dict[tuple[str, torch.device], Tensor] = {}


def dependence(tensor: Tensor) -> dict[str, bool]:
    """Return the launch options and the constant DEPENDENT for a kernel that works on `tensor`.

    DEPENDENT is True if the GPU can start the kernel before its predecessor ends. The kernel passes
    it to `after_predecessor`.
    """
    dependent = tensor.is_cuda and gpu_of(tensor.device).capability[0] >= 9
    return {"DEPENDENT": dependent, **launch_options(dependent)}


def launch_options(dependent: bool = False) -> dict[str, bool]:
    """Return the Triton options that every launch needs.

    `enable_fp_fusion` is set explicitly, because Triton 3.9 otherwise warns on stderr that its
    default, which is True, will change.

    dependent: whether the kernel may start before its predecessor ends.
    """
    return {"enable_fp_fusion": True} | ({"launch_pdl": True} if dependent else {})


@cache
def options_of(tiles: NamedTuple) -> dict[str, int]:
    """Return those fields of a launch configuration that are Triton options."""
    names = ("num_warps", "num_stages", "maxnreg")
    return {n: value for n, value in tiles._asdict().items() if n in names}


def counters(device: torch.device) -> Tensor:
    """Return counters, int32 [COUNTERS], that tell a kernel's programs which of them finishes last.

    They are zero when a kernel starts, and every kernel resets those that it uses. All kernels on a
    device share them, so these kernels must run on one stream.
    """
    return _kept_zeros("counters", COUNTERS, device)


def room_for_splits(
    splits: int, blocks: int, size: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Allocate the memory that `splits` programs need to compute a sum together.

    Returns uninitialised partial sums, fp32 [splits, *size], and the `counters` of the device. The
    kernel uses one counter for each of its `blocks` output blocks. Returns (None, None) if `splits`
    is 1.
    """
    if splits == 1:
        return None, None
    assert blocks <= COUNTERS
    return torch.empty((splits, *size), dtype=torch.float32, device=device), counters(device)


def epochs(device: torch.device) -> Tensor:
    """Return the counters for barriers between programs, int32 [EPOCHS, 2]. Each group of programs
    has two counters (see `epoch_of`). All kernels on a device share them, so these kernels must run
    on one stream."""
    return _kept_zeros("epochs", 2 * EPOCHS, device).view(EPOCHS, 2)


def _kept_zeros(name: str, size: int, device: torch.device) -> Tensor:
    if (name, device) not in _kept:
        # If the zeros were made during a graph capture, they would lie in the graph's own pool, and
        # every replay would clear them with a memset.
        assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), (
            "run once before capturing"
        )
        _kept[name, device] = torch.zeros(size, dtype=torch.int32, device=device)
    return _kept[name, device]


@triton.jit
def after_predecessor(DEPENDENT: tl.constexpr):
    """Wait for the predecessor's writes, then let the successor start."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def beside_predecessor(DEPENDENT: tl.constexpr):
    """Let the successor start, without waiting for the predecessor. The kernel must learn by other
    means which of the predecessor's writes it may read. Every program must call
    `end_beside_predecessor` at its end."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def end_beside_predecessor(DEPENDENT: tl.constexpr):
    """Wait until the predecessor has completed, so that kernels after this one come after it."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_l2(pointers):
    """Prefetch the 128-byte lines at the addresses in `pointers` into L2, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_acquired(pointers, SCOPE: tl.constexpr):
    """Load int32 counters with acquire semantics: data that was written before a counter was
    raised is visible after the load.

    pointers: pointers, or addresses as int64.
    SCOPE: "gpu", or "sys" for memory that several GPUs share.
    """
    if INTERPRETED:
        found = tl.load(pointers)
    else:
        found = tl.inline_asm_elementwise(
            "ld.acquire." + SCOPE + ".global.s32 $0, [$1];",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return found


@triton.jit
def is_last(counter_ptr, expected):
    """Return True in the last of `expected` programs that call this.

    The last program sees the stores of the others, but must load them with ".cg", because L1 may
    hold old values. It also resets the counter to zero.
    """
    tl.debug_barrier()  # count only after all threads have stored
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def epoch_of(epochs_ptr, expected):
    """Return the value that a group's arrival counter will have when all `expected` programs of the
    group have arrived at the next barrier.

    A group has two counters, which are never reset. The first counts all arrivals so far. The
    second is the value that the first had at the end of the last barrier. Call this only after
    `after_predecessor`, because the preceding kernel may still change the counters.
    """
    return tl.load(epochs_ptr + 1) + expected


@triton.jit
def arrive(epochs_ptr, epoch, COUNTED: tl.constexpr):
    """Make this program's earlier stores visible, then count its arrival at the barrier.

    epoch: the result of `epoch_of`.
    COUNTED: if True, return whether this program was the last to arrive. If False, always return
        False, which saves a round trip to memory. Programs that call `wait_for` use False.
    """
    tl.debug_barrier()  # count only after all threads have stored
    if COUNTED:
        return tl.atomic_add(epochs_ptr, 1, sem="acq_rel", scope="gpu") + 1 == epoch
    else:
        tl.atomic_add(epochs_ptr, 1, sem="release", scope="gpu")
        return False


@triton.jit
def wait_for(epochs_ptr, epoch):
    """Wait until all programs of a group have arrived at the barrier.

    epoch: the result of `epoch_of`.

    The programs of a group must all run at the same time, or the wait never ends. Programs start in
    the order of their ids, so a group must have adjacent ids and be small enough to run at once.
    After the wait, load the results of other programs with ".cg", because L1 may hold old values.
    """
    behind = tl.full([], -1, tl.int32)  # compare differences, because counters wrap around
    while behind < 0:
        behind = load_acquired(epochs_ptr, "gpu") - epoch
    tl.debug_barrier()


@triton.jit
def finish(epochs_ptr, epoch):
    """End a barrier: store `epoch`, the number of arrivals so far, from which `epoch_of` computes
    the epoch of the next barrier. Exactly one program of the group must call this, after all have
    arrived."""
    tl.store(epochs_ptr + 1, epoch)
