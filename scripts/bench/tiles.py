"""Tries tiles of a linear layer with few rows beside cuBLAS, to write the table of a device.

Prints a case for `specdec_kernels.linear.tile_tables` if tiles are faster than cuBLAS with the
further kernels that it needs. Takes up to 128 rows: a program holds all of them. It does not try
`linear.one_row_triton`, the kernel for one row of a narrow model.

    PYTHONPATH=.:kernels python scripts/bench/tiles.py add:2048x8192 gate:16384x2048 --rows 1 6

A product is named by its kind (norm, gate or add, as in `choose_tiles`) and the weight's rows and
columns; a gate has twice its features as rows. Needs a CUDA device; bf16. Each candidate runs
repeatedly in a CUDA graph, with weights from memory and with weights that stay in the L2 cache. If
both take the same time, the kernel's loop is the limit. The present tiles are printed first, then
cuBLAS and the best. The best tiles alone may not be the best in a pass, where kernels overlap: see
`kernel_times.py --parts passes`. Compiling takes a second per candidate; N processes with
`--compile I/N` compile in advance.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from statistics import median

import torch
from graph_times import graph_times
from rates import read_rate
from specdec_kernels.gpu import MULTIPROCESSORS, SHARED_MEMORY
from specdec_kernels.linear.few_rows_triton import few_rows_linear
from specdec_kernels.linear.products_triton import (
    Product,
    linear_add_norm_triton,
    norm_gate_up_triton,
    norm_linear_triton,
)
from specdec_kernels.linear.reference import Normed
from specdec_kernels.linear.tiles import FEW_ROWS, Tiles, choose_tiles
from specdec_kernels.tiles import Case
from torch import Tensor

WEIGHT_BYTES = 300e6  # bytes read between two uses of the same weight
LAUNCHES = 32
GAIN = 1.01  # largest share of cuBLAS' time at which tiles replace it
EPS = 1e-5


def candidates(kind: str, width: int, features: int, block_m: int) -> Iterator[Tiles]:
    """Tiles that divide the width, with the stages that fit 1, 2 or 3 times on a multiprocessor."""
    parts = 2 if kind == "gate" else 1
    if block_m > 64:
        yield from wide_candidates(kind, width, features, block_m)
        return
    sizes = (16, 32, 64, 128) if width <= 512 else (16, 32, 64)  # few numbers need many features
    for block_n, block_k, slices in product(sizes, (128, 256, 512, 1024), (1, 2, 4)):
        programs = -(-features // block_n)
        if width % block_k or not 64 <= block_k // slices <= 256:
            continue
        for each in (1,) if programs <= MULTIPROCESSORS else (1, 2, 3):
            stage = (parts * block_n + block_m) * block_k * 2
            stages = min((SHARED_MEMORY // each - 5120) // stage + 1, 12)
            prefetch = 512 if kind == "add" else 256
            tiles = Tiles(block_m, block_n, block_k, slices, 1, prefetch, 4, stages)
            if stages >= 3:
                yield tiles
                splits = 1 if kind == "gate" else 2 * MULTIPROCESSORS // programs
                for n in range(2, min(splits, 4) + 1):
                    if width % (n * block_k) == 0:
                        yield tiles._replace(splits=n)
            if stages >= 3 and kind != "gate" and width >= 1024 and 512 % block_k == 0:
                yield tiles._replace(early=512)


def wide_candidates(kind: str, width: int, features: int, block_m: int) -> Iterator[Tiles]:
    """Tiles for more than 64 rows, with two warpgroups where the sums need their registers."""
    parts = 2 if kind == "gate" else 1
    for block_n, block_k, splits in product((32, 64, 128, 256), (64, 128), (1, 2, 3, 4)):
        sums = block_m * block_n * parts
        if sums > 2**15:  # 128 registers of each of 256 threads
            continue
        if splits > 1 and (kind == "gate" or -(-features // block_n) * splits > MULTIPROCESSORS):
            continue
        stage = (parts * block_n + block_m) * block_k * 2
        for warps, each in product((4, 8) if sums <= 2**13 else (8,), (1, 2)):
            stages = min((SHARED_MEMORY // each - 5120) // stage, 6)
            if width % (splits * block_k) == 0 and stages >= 3:
                yield Tiles(block_m, block_n, block_k, 1, splits, 256, warps, stages)


class Layer:
    """One linear layer on random tensors."""

    def __init__(self, kind: str, weight_rows: int, width: int, rows: int, copies: int) -> None:
        self.kind, self.width = kind, width
        self.features = weight_rows // (2 if kind == "gate" else 1)
        self.weights = [self.normal(weight_rows, width) for _ in range(copies)]
        self.x, self.residual = self.normal(rows, width), self.normal(rows, self.features)
        self.norm = self.normal(self.features)
        self.squares = torch.ones(rows, 1, dtype=torch.float32, device="cuda")

    def normal(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)

    def run(self, product: Product | None, weight: Tensor) -> Tensor:
        """The layer by one of our kernels, or by cuBLAS with the further kernels that it needs."""
        if self.kind == "add":
            add = self.residual, self.norm, EPS
            return linear_add_norm_triton(self.x, weight, *add, choose=lambda *_: product).scaled
        squares = self.squares if product is not None and len(self.x) <= FEW_ROWS else None
        x = Normed(self.x, self.x, squares, EPS)
        run = norm_gate_up_triton if self.kind == "gate" else norm_linear_triton
        return run(x, weight, choose=lambda *_: product)

    def microseconds(self, product: Product | None) -> tuple[float, float]:
        """Microseconds with weights from memory, and with weights from the L2 cache."""
        fresh = timed(lambda i: self.run(product, self.weights[i % len(self.weights)]))
        return fresh, timed(lambda _: self.run(product, self.weights[0]))

    def chosen(self) -> Tiles | None:
        return choose_tiles(self.kind, self.x, self.weights[0])


def timed(step: Callable[[int], object]) -> float:
    """Median microseconds per launch, of LAUNCHES in a graph."""
    return median(graph_times(step, LAUNCHES, 7))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("products", nargs="+", metavar="KIND:ROWSxCOLUMNS")
    parser.add_argument("--rows", nargs="+", type=int, default=[1])
    parser.add_argument("--best", type=int, default=5, help="number of tiles to print")
    parser.add_argument("--compile", default="", metavar="I/N", help="only compile a part")
    args = parser.parse_args()
    share = tuple(map(int, args.compile.split("/"))) if args.compile else None
    bandwidth = 0.0 if share else read_rate(graph_times)
    if not share:
        print("us from memory, us from the L2 cache, tiles")
    for text, rows in product(args.products, args.rows):
        kind, _, size = text.partition(":")
        weight_rows, width = map(int, size.split("x"))
        copies = 1 if share else max(2, int(WEIGHT_BYTES / (weight_rows * width * 2)))
        case = Layer(kind, weight_rows, width, rows, copies)
        block_m = 8 if rows <= 8 else max(16, 1 << (rows - 1).bit_length())
        chosen = case.chosen()
        tried = [*([chosen] if chosen else ()), *candidates(kind, width, case.features, block_m)]
        found = list(dict.fromkeys(tried))
        times = {}
        for tiles in found[share[0] :: share[1]] if share else found:
            kernel = partial(few_rows_linear, tiles=tiles)
            try:
                case.run(kernel, case.weights[0])
            except Exception as error:  # too few registers, or too little shared memory
                print(f"  {type(error).__name__}: {tuple(tiles)}")
                continue
            if not share:
                times[tiles] = case.microseconds(kernel)
        if share:
            continue
        floor = weight_rows * width * 2 / bandwidth / 1e6
        print(f"{text}, {rows} rows; {floor:.1f} us of memory at {bandwidth:.2f} TB/s")
        best = sorted(times, key=lambda tiles: times[tiles])[: args.best]
        library = case.microseconds(None)
        shown = [(times[chosen], str(chosen))] if chosen else []
        shown += [(library, "cuBLAS"), *((times[tiles], str(tiles)) for tiles in best)]
        for (fresh, cached), name in shown:
            print(f"  {fresh:7.2f} {cached:7.2f}  {name}")
        if best and times[best[0]][0] * GAIN < library[0]:
            print(f"  {kind}: {Case(best[0], (rows, case.features), (width,))}")


if __name__ == "__main__":
    main()
