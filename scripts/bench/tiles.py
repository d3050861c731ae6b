"""Tries tiles of a linear layer with few rows, to choose those of `specdec_kernels.linear.tiles`.

It does not try `linear.one_row_triton`, the kernel for one row of a narrow model.

    PYTHONPATH=.:kernels python scripts/bench/tiles.py add:2048x8192 gate:16384x2048 --rows 1 6

A product is named by its kind (norm, gate or add, as in `choose_tiles`) and the weight's rows and
columns; a gate has twice its features as rows. Needs a CUDA device; bf16. Each candidate runs
repeatedly in a CUDA graph, with weights from memory and with weights that stay in the L2 cache. If
both take the same time, the kernel's loop is the limit. The chosen tiles are printed first, then
the best. The best tiles alone may not be the best in a pass, where kernels overlap: see
`kernel_times.py --parts passes`. Compiling takes a second per candidate; N processes with
`--compile I/N` compile in advance.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import product
from statistics import median

import torch
from graph_times import graph_times
from rates import read_rate
from specdec_kernels.gpu import MULTIPROCESSORS, SHARED_MEMORY
from specdec_kernels.linear.few_rows_triton import few_rows_linear
from specdec_kernels.linear.tiles import Tiles, choose_tiles
from torch import Tensor

WEIGHT_BYTES = 300e6  # read between two uses of the same weight
LAUNCHES = 32


def candidates(kind: str, width: int, features: int, block_m: int) -> Iterator[Tiles]:
    """Tiles that divide the width, with the stages that fit 1, 2 or 3 times on a multiprocessor."""
    parts = 2 if kind == "gate" else 1
    for block_n, block_k, slices in product((16, 32, 64), (128, 256, 512, 1024), (1, 2, 4)):
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
            if stages >= 3 and kind != "gate" and width >= 1024 and 512 % block_k == 0:
                yield tiles._replace(early=512)


class Product:
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

    def run(self, weight: Tensor, tiles: Tiles) -> Tensor:
        if self.kind == "add":
            more = {"residual": self.residual, "norm_weight": self.norm}
            return few_rows_linear(self.x, weight, tiles, **more)[0]
        activation = "silu" if self.kind == "gate" else ""
        more = {"squares": self.squares, "eps": 1e-5, "activation": activation}
        return few_rows_linear(self.x, weight, tiles, **more)[0]

    def microseconds(self, tiles: Tiles) -> tuple[float, float]:
        """Microseconds with weights from memory, and with weights from the L2 cache."""
        fresh = timed(lambda i: self.run(self.weights[i % len(self.weights)], tiles))
        return fresh, timed(lambda _: self.run(self.weights[0], tiles))

    def chosen(self) -> Tiles:
        tiles = choose_tiles(self.kind, self.x, self.weights[0])
        assert tiles is not None, "so many rows are cuBLAS'"
        return tiles


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
        case = Product(kind, weight_rows, width, rows, copies)
        block_m = 8 if rows <= 8 else max(16, 1 << (rows - 1).bit_length())
        chosen = case.chosen()
        found = list(dict.fromkeys([chosen, *candidates(kind, width, case.features, block_m)]))
        times = {}
        for tiles in found[share[0] :: share[1]] if share else found:
            try:
                case.run(case.weights[0], tiles)
            except Exception as error:  # needs more registers or shared memory than there are
                print(f"  {type(error).__name__}: {tuple(tiles)}")
                continue
            if not share:
                times[tiles] = case.microseconds(tiles)
        if not share:
            floor = weight_rows * width * 2 / bandwidth / 1e6
            print(f"{text}, {rows} rows; {floor:.1f} us of memory at {bandwidth:.2f} TB/s")
            for tiles in [chosen, *sorted(times, key=lambda t: times[t])[: args.best]]:
                print(f"  {times[tiles][0]:7.2f} {times[tiles][1]:7.2f}  {tiles}")


if __name__ == "__main__":
    main()
