"""Tries tiles of linear layers with few rows in passes of a few layers, where kernels overlap.

    PYTHONPATH=.:kernels python scripts/bench/pass_tiles.py qwen2.5-14b --rows 32 48 \
        --tries add:64,64,128,1,1,512,4,6 norm:64,64,128,1,1,256,4,5+gate:64,64,128,1,1,256,8,4

A try gives tiles (the fields of `Tiles`) to some linear layers: norm (q, k and v), gate (gate and
up), out, down, or add (out and down). The others keep their chosen tiles, as all do in the first
line. There is no attention. Needs a CUDA device; bf16. Graphs alternate: most differences of 0.3 us
a layer repeat. N processes with `--compile I/N` compile in advance.
"""

import argparse
from functools import partial
from statistics import median
from typing import Any

import torch
from graph_times import alternated_times, graph_times
from rates import read_rate
from shapes import MODELS, Model
from specdec_kernels.linear.few_rows_triton import few_rows_linear
from specdec_kernels.linear.products_triton import kernel_for
from specdec_kernels.linear.tiles import Tiles
from torch import Tensor

EPS = 1e-5
KINDS = {"norm": "norm", "out": "add", "gate": "gate", "down": "add"}
Try = dict[str, Tiles]
Outputs = tuple[Tensor, Tensor, Tensor]


def parsed(text: str) -> Try:
    """Parse `KIND:TILES+KIND:TILES` into tiles by the names of KINDS."""
    found: Try = {}
    for part in text.split("+"):
        kind, _, fields = part.partition(":")
        for name in ("out", "down") if kind == "add" else (kind,):
            if name not in KINDS:
                raise argparse.ArgumentTypeError(f"{name} is none of add, {', '.join(KINDS)}")
            found[name] = Tiles(*map(int, fields.split(",")))
    return found


class Layers:
    """Random weights of layers without attention, and rows that go through them."""

    def __init__(self, model: Model, count: int) -> None:
        heads = model.heads * model.head_dim
        self.heads, self.hidden = heads, model.hidden
        shapes = {
            "norm": (heads + 2 * model.kv_heads * model.head_dim, model.hidden),
            "out": (model.hidden, heads),
            "gate": (2 * model.ffn, model.hidden),
            "down": (model.hidden, model.ffn),
        }
        self.weights = [
            {name: self.normal(*shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
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
            after = {"residual": hidden, "norm_weight": self.norm}
            hidden, scaled, squares = product("out", mixed, weights, tries)(**after)
            scale = {"squares": squares, "eps": EPS, "activation": "silu"}
            inner = product("gate", scaled, weights, tries)(**scale)[0]
            after = {"residual": hidden, "norm_weight": self.norm}
            hidden, scaled, squares = product("down", inner, weights, tries)(**after)
        return hidden


def product(name: str, x: Tensor, weights: dict[str, Tensor], tries: Try) -> partial[Outputs]:
    """The launch of a linear layer, without norm, residual and activation."""
    if name in tries:
        return partial(few_rows_linear, x, weights[name], tries[name])
    chosen = kernel_for(KINDS[name], x, weights[name])
    assert chosen is not None, "so many rows are cuBLAS'"
    return partial(chosen, x, weights[name])


def runs(layers: Layers, hidden: Tensor, tries: Try, expected: Tensor) -> bool:
    """Compile the tiles; False if the device lacks the resources for them."""
    try:
        out = layers.forward(hidden, tries)
    except Exception as error:
        print(f"  {type(error).__name__}: {tries}")
        return False
    off = (out.float() - expected.float()).norm() / expected.float().norm()
    assert off < 0.05, f"{tries} differs by {off:.3f}"
    return True


def step(layers: Layers, hidden: Tensor, tries: Try, _: int) -> Tensor:
    """`Layers.forward` as a step of `alternated_times`."""
    return layers.forward(hidden, tries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--tries", nargs="+", type=parsed, default=[], metavar="KIND:TILES")
    parser.add_argument("--compile", default="", metavar="I/N", help="only compile a part")
    args = parser.parse_args()

    share = tuple(map(int, args.compile.split("/"))) if args.compile else None
    bandwidth = 0.0 if share else read_rate(graph_times)
    layers = Layers(MODELS[args.model], 1 if share else args.layers)
    for rows in args.rows:
        hidden = layers.normal(rows, layers.hidden)
        expected = layers.forward(hidden, {})
        found = [t for t in args.tries if all(tiles.block_m >= rows for tiles in t.values())]
        found = found[share[0] :: share[1]] if share else found
        found = [{}, *(tries for tries in found if runs(layers, hidden, tries, expected))]
        if share:
            continue
        steps = [partial(step, layers, hidden, tries) for tries in found]
        times = [median(t) / args.layers for t in alternated_times(steps, 1, 25)]
        size = sum(w.nbytes for w in layers.weights[0].values())
        floor = size / bandwidth / 1e6
        at = f"{floor:.1f} us of memory a layer at {bandwidth:.2f} TB/s"
        print(f"{args.model}, {rows} rows; {at}")
        for tries, time in zip(found, times, strict=True):
            tiles = ", ".join(f"{kind} {tuple(t)}" for kind, t in tries.items())
            print(f"  {time:7.2f} {time - times[0]:+6.2f}  {tiles or 'as chosen'}")


if __name__ == "__main__":
    main()
