"""What kernels of a chain take that read as many bytes as a layer's attention, and do little else.

Each program loads its tile before it waits for the predecessor, as attention loads old keys and
values, multiplies it with what the predecessor wrote, and stores a row: with "sum", once it has
added up the rows of all programs of a key head, as attention combines the parts of a context. The
least of several cuts is what attention's times are to be compared with, since no kernel of a chain
takes only its bytes' time.

    python scripts/bench/reading.py
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import statistics

import torch
import triton
import triton.language as tl
from graph_times import graph_times
from specdec_kernels.launch_triton import (
    after_predecessor,
    arrive,
    epoch_of,
    epochs,
    finish,
    wait_for,
)

KEY_HEADS, HEAD_DIM = 8, 128  # of the 8B model
# Programs, rows of a tile, warps. Those that wait for each other must all run at once.
SUMMING_CUTS = [(128, 128, 4), (128, 256, 8), (256, 128, 4), (256, 256, 8)]
CUTS = [*SUMMING_CUTS, (512, 128, 4)]
LAYERS = 16  # whose caches are read in turn: more than the L2 cache holds


@triton.jit
def reading_kernel(
    cache_ptr,  # [programs, TILES, ROWS, D]
    before_ptr,  # [D], which the predecessor wrote
    out_ptr,  # [programs, D], out
    rows_ptr,  # [programs, D] fp32, out; only with MEMBERS > 1
    epochs_ptr,  # [programs / MEMBERS, 2] int32, in and out; only with MEMBERS > 1
    D: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    MEMBERS: tl.constexpr,  # programs whose rows are added up, a power of two
):
    program = tl.program_id(0)
    dim = tl.arange(0, D)
    at = cache_ptr + program.to(tl.int64) * (TILES * ROWS * D)
    at += tl.arange(0, ROWS)[:, None] * D + dim[None, :]
    tile = tl.load(at)
    after_predecessor(True)
    if MEMBERS > 1:
        epochs_ptr += 2 * (program // MEMBERS)
        epoch = epoch_of(epochs_ptr, MEMBERS)
    before = tl.load(before_ptr + dim).to(tl.float32)
    total = tl.sum(tile.to(tl.float32) * before[None, :], axis=0)
    for index in range(1, TILES):
        tile = tl.load(at + index * (ROWS * D))
        total += tl.sum(tile.to(tl.float32) * before[None, :], axis=0)
    if MEMBERS > 1:
        tl.store(rows_ptr + program * D + dim, total)
        arrive(epochs_ptr, epoch, False)
        if program % MEMBERS >= 4:  # as many as a key head has query heads combine
            return
        wait_for(epochs_ptr, epoch)
        member = program // MEMBERS * MEMBERS + tl.arange(0, MEMBERS)
        rows = tl.load(rows_ptr + member[:, None] * D + dim[None, :], cache_modifier=".cg")
        total = tl.sum(rows, axis=0)
        if program % MEMBERS == 0:
            finish(epochs_ptr, epoch)
    tl.store(out_ptr + program * D + dim, total.to(out_ptr.dtype.element_ty))


def microseconds(context: int, cut: tuple[int, int, int], is_summed: bool) -> float:
    """A kernel's time in a graph of such kernels."""
    programs, rows, warps = cut
    numbers = 2 * context * KEY_HEADS * HEAD_DIM
    tiles = numbers // (programs * rows * HEAD_DIM)
    assert tiles * programs * rows * HEAD_DIM == numbers
    kind = {"device": torch.device("cuda")}
    caches = [torch.randn(numbers, dtype=torch.bfloat16, **kind) for _ in range(LAYERS)]
    written = torch.randn(2, programs, HEAD_DIM, dtype=torch.bfloat16, **kind)
    sums = torch.empty(programs, HEAD_DIM, **kind)

    def step(number: int) -> None:
        reading_kernel[(programs,)](
            caches[number % LAYERS],
            written[number % 2],
            written[(number + 1) % 2],
            sums,
            epochs(sums.device),
            D=HEAD_DIM,
            ROWS=rows,
            TILES=tiles,
            MEMBERS=programs // KEY_HEADS if is_summed else 1,
            num_warps=warps,
            launch_pdl=True,
        )

    step(0)
    return statistics.median(graph_times(step, 10 * LAYERS, 30))


def main() -> None:
    print("| context | bytes at 4.3 TB/s, us | read | read and sum |")
    print("|---|---|---|---|")
    for context in (4096, 16384):
        floor = 2 * context * KEY_HEADS * HEAD_DIM * 2 / 4.3e6
        read = min(microseconds(context, cut, is_summed=False) for cut in CUTS)
        summed = min(microseconds(context, cut, is_summed=True) for cut in SUMMING_CUTS)
        print(f"| {context} | {floor:.1f} | {read:.1f} | {summed:.1f} |")


main()
