"""Tries tiles of linear layers with few rows in passes of a few layers, where kernels overlap.

    PYTHONPATH=.:kernels python scripts/bench/pass_tiles.py qwen2.5-14b --rows 32 48 \
        --tries add:64,64,128,1,1,512,4,6 norm:64,64,128,1,1,256,4,5+gate:64,64,128,1,1,256,8,4

A try gives tiles (the fields of `Tiles`) to some linear layers: norm (q, k and v), gate (gate and
up), out, down, or add (out and down). Three fields are those of `RowTiles`, for one row; 0 slices
are for terms of x over stored fp8 and int4. The others
keep their chosen tiles, as all do in the first line. There is no attention. Needs a CUDA device;
bf16. Graphs alternate: most differences of 0.3 us a layer repeat. N processes with `--compile I/N`
compile in advance.

With torchrun the layers are split over its ranks, and sums go through memory that they share. For
few rows, matmuls send their parts to the other ranks. With the try `store` they store them, and the
sums send them; with `read`, sums read the other ranks' parts. Times are the slowest rank's.
"""

import argparse
import os
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from graph_times import alternated_times, graph_times
from rates import read_rate
from shapes import MODELS, STORAGES, Model
from specdec_kernels.comm.peers import Peers
from specdec_kernels.comm.peers_triton import Outputs, reduce_add_norm_triton
from specdec_kernels.linear.few_rows_triton import few_rows_linear
from specdec_kernels.linear.one_row_triton import one_row_linear
from specdec_kernels.linear.products_triton import kernel_for
from specdec_kernels.linear.stored import Storage, Stored
from specdec_kernels.linear.stored_rows_triton import stored_rows_linear
from specdec_kernels.linear.tile_tables import Tiles
from specdec_kernels.linear.tiles import RowTiles, slices_for
from torch import Tensor

from specdec_cli.core.parallel import make_groups
from specdec_cli.core.peers import shared_memory

EPS = 1e-5
KINDS = {"norm": "norm", "out": "add", "gate": "gate", "down": "add"}
READ, STORE = "read", "store"
Try = dict[str, Tiles | RowTiles | None]
Results = tuple[Tensor, Tensor, Tensor]


def parsed(text: str) -> Try:
    """Parse `KIND:TILES+KIND:TILES` into tiles by the names of KINDS."""
    found: Try = {}
    for part in text.split("+"):
        kind, _, fields = part.partition(":")
        if kind in (READ, STORE):
            found[kind] = None
            continue
        for name in ("out", "down") if kind == "add" else (kind,):
            if name not in KINDS:
                raise argparse.ArgumentTypeError(f"{name} is none of add, {', '.join(KINDS)}")
            numbers = tuple(map(int, fields.split(",")))
            found[name] = RowTiles(*numbers) if len(numbers) == 3 else Tiles(*numbers)
    return found


class Layers:
    """Random weights of layers without attention, and rows that go through them."""

    def __init__(
        self, model: Model, count: int, size: int, peers: Peers | None, storage: Storage | None
    ) -> None:
        """size: the number of ranks over which the layers are split. peers: their shared memory, if
        there are several. storage: the weights' storage; None for plain ones."""
        heads, ffn = model.heads * model.head_dim // size, model.ffn // size
        self.heads, self.hidden, self.peers = heads, model.hidden, peers
        shapes = {
            "norm": (heads + 2 * model.kv_heads * model.head_dim // size, model.hidden),
            "out": (model.hidden, heads),
            "gate": (2 * ffn, model.hidden),
            "down": (model.hidden, ffn),
        }
        held = (lambda w: w) if storage is None else storage.quantised
        self.weights: list[dict[str, Any]] = [
            {name: held(self.normal(*shape) * shape[1] ** -0.5) for name, shape in shapes.items()}
            for _ in range(count)
        ]
        self.norm = 1 + self.normal(model.hidden) / 10

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device="cuda")

    def forward(self, hidden: Tensor, tries: Try) -> Tensor:
        """The residual stream [T, hidden] after all layers."""
        scaled = hidden * self.norm
        squares = hidden.float().square().sum(1, keepdim=True)
        for weights in self.weights:
            scale: dict[str, Any] = {"squares": squares, "eps": EPS}
            mixed = product("norm", scaled, weights, tries)(**scale)[0][:, : self.heads]
            hidden, scaled, squares = self.added(0, "out", mixed, weights, tries, hidden)
            scale = {"squares": squares, "eps": EPS, "activation": "silu"}
            inner = product("gate", scaled, weights, tries)(**scale)[0]
            hidden, scaled, squares = self.added(1, "down", inner, weights, tries, hidden)
        return hidden

    def added(
        self, place: int, name: str, x: Tensor, weights: dict[str, Any], tries: Try, to: Tensor
    ) -> Results:
        """A product, summed over ranks, that is added to the residual stream and normed."""
        run, peers = product(name, x, weights, tries), self.peers
        if peers is None:
            return run(residual=to, norm_weight=self.norm)
        peers = replace(peers, pushed=None) if READ in tries else peers
        inbox = None if STORE in tries else peers.inbox(place, len(to))
        outputs = Outputs.allocated(peers.parts, len(to), has_norm=True)
        run(into=peers.take(place, *to.shape), inbox=inbox)
        end = to, self.norm, EPS, outputs, inbox is not None
        hidden, scaled, squares, _ = reduce_add_norm_triton(peers, place, *end)
        assert squares is not None
        return hidden, scaled, squares


def product(name: str, x: Tensor, weights: dict[str, Any], tries: Try) -> partial[Results]:
    """The launch of a linear layer, without norm, residual and activation."""
    if (tiles := tries.get(name)) is not None:
        weight = weights[name]
        if isinstance(tiles, RowTiles):
            return partial(one_row_linear, x, weight, tiles)
        if isinstance(weight, Stored):
            if tiles.slices == 0:
                tiles = tiles._replace(slices=1)
                return partial(stored_rows_linear, x, weight, tiles, as_terms=True)
            slices = slices_for(weight, tiles.block_k, tiles.slices)
            assert slices is not None, "no slices fit its groups"
            return partial(stored_rows_linear, x, weight, tiles._replace(slices=slices))
        return partial(few_rows_linear, x, weight, tiles)
    chosen = kernel_for(KINDS[name], x, weights[name])
    assert chosen is not None, "so many rows are cuBLAS'"
    return partial(chosen, x, weights[name])


def is_for(tiles: Tiles | RowTiles | None, rows: int, storage: Storage | None) -> bool:
    """True if a try is for this many rows."""
    if isinstance(tiles, RowTiles):
        return rows == 1
    return tiles is None or storage is not None or tiles.block_m >= rows


def runs(layers: Layers, hidden: Tensor, tries: Try, expected: Tensor) -> bool:
    """Compile the tiles. Returns False if the device lacks the resources for them."""
    try:
        out = layers.forward(hidden, tries)
    except Exception as error:
        print(f"  {type(error).__name__}: {tries}")
        return False
    off = (out.float() - expected.float()).norm() / expected.float().norm()
    if off > 0.05:
        print(f"  {tries} differs by {off:.3f}")
    return bool(off < 0.05)


def step(layers: Layers, hidden: Tensor, tries: Try, _: int) -> Tensor:
    """`Layers.forward` as a step of `alternated_times`."""
    return layers.forward(hidden, tries)


def joined(width: int) -> Peers:
    """The memory that this rank shares with the other ranks of torchrun."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    size = dist.get_world_size()
    parallel = make_groups(size, size, device).target
    assert parallel is not None
    shared = shared_memory(parallel, width, 2 * size, torch.bfloat16)
    assert shared is not None, "these GPUs cannot read each other"
    return shared.sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--tries", nargs="+", type=parsed, default=[], metavar="KIND:TILES")
    parser.add_argument("--compile", default="", metavar="I/N", help="only compile a part")
    parser.add_argument("--weights", choices=STORAGES, help="stored, as this kind")
    args = parser.parse_args()

    share = tuple(map(int, args.compile.split("/"))) if args.compile else None
    model, ranks = MODELS[args.model], int(os.environ.get("WORLD_SIZE", "1"))
    peers = joined(model.hidden) if ranks > 1 else None
    storage = STORAGES.get(args.weights)
    bandwidth = 0.0 if share else read_rate(graph_times)
    layers = Layers(model, 1 if share else args.layers, ranks, peers, storage)
    for rows in args.rows:
        hidden = layers.normal(rows, layers.hidden)
        expected = layers.forward(hidden, {})
        fits = [all(is_for(u, rows, storage) for u in t.values()) for t in args.tries]
        found = [t for t, fit in zip(args.tries, fits, strict=True) if fit]
        found = found[share[0] :: share[1]] if share else found
        found = [{}, *(tries for tries in found if runs(layers, hidden, tries, expected))]
        if share:
            continue
        steps = [partial(step, layers, hidden, tries) for tries in found]
        times = [median(t) / args.layers for t in alternated_times(steps, 1, 25)]
        if peers is not None:
            slowest = torch.tensor(times, device="cuda")
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times = slowest.tolist()
            if peers.rank:
                continue
        size = sum(getattr(w, "num_bytes", None) or w.nbytes for w in layers.weights[0].values())
        floor = size / bandwidth / 1e6
        at = f"{floor:.1f} us of memory a layer at {bandwidth:.2f} TB/s"
        print(f"{args.model}, {rows} rows; {at}")
        for tries, time in zip(found, times, strict=True):
            tiles = ", ".join(f"{kind} {tuple(t or ())}" for kind, t in tries.items())
            print(f"  {time:7.2f} {time - times[0]:+6.2f}  {tiles or 'as chosen'}")


if __name__ == "__main__":
    main()
