"""Times the expert half of decoder layers on this GPU, by tokens and tiles.

Each layer has its own weights, more than the L2 cache holds, and random tokens choose experts
nearly uniformly. Prints microseconds a layer and the rate at which the chosen experts are read: for
the router alone, with gate and up, and for the whole, while tiles of one of the two products
change. The kernels are those that the engine would choose. `--alike 4` lets four tokens in a row
choose nearly the same experts, as the proposals for one sequence do.

    python scripts/bench/experts.py --tokens 1,8,32
    python scripts/bench/experts.py --tokens 72,128,192 --alike 4
    python scripts/bench/experts.py --weights mxfp4 --experts 32 --chosen 4 --width 2880 \\
        --features 2880
"""

import argparse
from collections.abc import Callable
from statistics import median

import torch
from graph_times import graph_times
from specdec_kernels.experts.down_triton import down_add_norm_triton
from specdec_kernels.experts.gate_up_triton import gate_up_triton
from specdec_kernels.experts.group_triton import group_triton
from specdec_kernels.experts.grouped_triton import grouped_mixture_add_norm, grouped_product
from specdec_kernels.experts.mixture_triton import has_few_tokens
from specdec_kernels.experts.reference import Experts, Routing, in_tiles
from specdec_kernels.experts.route_triton import route_triton
from specdec_kernels.experts.sorted_triton import sorted_mixture_add_norm
from specdec_kernels.experts.tiles import (
    ExpertTiles,
    GroupTiles,
    choose_expert_tiles,
    choose_group_tiles,
    way_of,
)
from specdec_kernels.linear.reference import Normed
from specdec_kernels.linear.stored import Storage
from torch import Tensor

CUDA = torch.device("cuda")
GATE_UP = {
    8: [
        *(ExpertTiles(8, 16, 512, 4, 1, 0, 4, n) for n in (2, 3)),
        *(ExpertTiles(8, 16, 256, 4, 1, 0, 4, n) for n in (3, 5)),
        ExpertTiles(8, 32, 256, 4, 1, 0, 4, 3),
        ExpertTiles(8, 32, 256, 4, 1, 0, 8, 4),
        ExpertTiles(8, 64, 128, 1, 1, 0, 4, 4),
    ],
    16: [
        ExpertTiles(16, 16, 256, 4, 1, 0, 4, 4),
        ExpertTiles(16, 32, 128, 1, 1, 0, 4, 5),
        ExpertTiles(16, 64, 128, 1, 1, 0, 4, 4),
    ],
}
DOWN = {
    8: [
        *(ExpertTiles(8, 16, 256, 4, 1, ahead, 4, 6) for ahead in (0, 2, 8)),
        ExpertTiles(8, 16, 256, 4, 1, 4, 4, 9),
        *(ExpertTiles(8, 16, 256, 4, splits, 2, 4, 5) for splits in (2, 4)),
        ExpertTiles(8, 32, 256, 4, 4, 2, 4, 5),
        ExpertTiles(8, 32, 256, 4, 8, 1, 4, 4),
    ],
    16: [
        ExpertTiles(16, 16, 256, 4, 2, 2, 4, 5),
        ExpertTiles(16, 32, 256, 1, 4, 2, 4, 4),
        ExpertTiles(16, 32, 128, 1, 8, 2, 4, 5),
    ],
}
MXFP4_GATE_UP = [
    *(ExpertTiles(8, 32, 256, 1, 1, 0, 4, n, r) for n in (3, 4) for r in (80, None)),
    *(ExpertTiles(8, 32, 512, 1, 1, 0, 4, n, r) for n in (2, 3) for r in (96, None)),
    *(ExpertTiles(8, 16, k, 1, 1, 0, 2, n) for k, n in ((256, 3), (256, 5), (512, 3))),
    ExpertTiles(8, 32, 128, 1, 1, 0, 4, 5),
]
MXFP4_DOWN = [
    *(ExpertTiles(8, 64, 256, 1, n, 2, 4, 3, 96) for n in (4, 8, 16, 32)),
    *(ExpertTiles(8, 64, 512, 1, n, 2, 4, 2, 96) for n in (4, 8, 16)),
    *(ExpertTiles(8, 32, 256, 1, n, 2, 2, 3) for n in (4, 8, 16)),
    ExpertTiles(8, 64, 256, 1, 8, 2, 4, 3),
    ExpertTiles(8, 64, 256, 1, 8, 2, 4, 4, 96),
]
GROUPED_GATE_UP = [
    *(GroupTiles(m, 64, 64, 4, 5) for m in (16, 32, 64)),
    *(GroupTiles(m, 64, 128, 4, n) for m, n in ((16, 3), (32, 4), (64, 4))),
    GroupTiles(64, 64, 64, 4, 6),
    GroupTiles(32, 128, 64, 8, 4),
]
GROUPED_DOWN = [
    *(GroupTiles(m, 64, 128, 4, 4) for m in (16, 32, 64)),
    *(GroupTiles(m, 128, 64, 8, 5) for m in (16, 32, 64)),
    *(GroupTiles(m, 128, 128, 4, 4) for m in (32, 64)),
    GroupTiles(16, 128, 128, 8, 3),
    GroupTiles(64, 128, 64, 4, 4),
]


MXFP4_GROUPED = [  # tiles of down; those of gate and up have half as many features
    *(GroupTiles(8, 64, 256, 4, n, 1, r) for n in (2, 3, 4) for r in (80, 96, None)),
    *(GroupTiles(8, 64, 512, 4, n, 1, r) for n in (2, 3) for r in (96, None)),
    *(GroupTiles(16, 64, 256, 4, n, 1, r) for n in (3, 4) for r in (128, None)),
    *(GroupTiles(16, 64, 128, 4, n, 1, 96) for n in (3, 4)),
    GroupTiles(16, 128, 128, 8, 3, 1, 96),
    *(
        GroupTiles(32, 64, k, 4, n, 1, r)
        for k, n, r in ((256, 3, None), (128, 3, None), (128, 4, 128))
    ),
    *(GroupTiles(32, 128, 128, 8, 3, 1, r) for r in (112, None)),
    GroupTiles(64, 128, 128, 8, 3),
]


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def make_layer(args: argparse.Namespace) -> Experts:
    count, width, features = args.experts, args.width, args.features

    def normal(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=CUDA).normal_(0, size[-1] ** -0.5)

    router, gate_up, down = (
        normal(count, width),
        normal(count, 2 * features, width),
        normal(count, width, features),
    )
    experts = Experts(router, gate_up, down, Routing(args.chosen, renormalise=True))
    if args.weights == "plain":
        return experts
    storage = Storage("mxfp4", (1, 32), scales=torch.uint8)
    experts = experts._replace(gate_up=storage.quantised(gate_up), down=storage.quantised(down))
    return in_tiles(experts, torch.bfloat16)


def streams(rows: int, args: argparse.Namespace) -> list[Normed]:
    found = []
    for _ in range(args.layers):
        groups = torch.randn(-(-rows // args.alike), args.width, device=CUDA)
        hidden = groups.repeat_interleave(args.alike, 0)[:rows]
        if args.alike > 1:
            hidden += 0.3 * torch.randn_like(hidden)
        hidden = hidden.to(torch.bfloat16)
        squares = hidden.float().square().view(rows, 64, -1).sum(2)
        found.append(Normed(hidden, hidden, squares, 1e-6))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=numbers, default=[1, 8, 32])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--chosen", type=int, default=8)
    parser.add_argument("--alike", type=int, default=1, help="tokens in a row that choose alike")
    parser.add_argument("--weights", choices=["plain", "mxfp4"], default="plain")
    parser.add_argument("--compile", action="store_true", help="only fill the compiler's cache")
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = [make_layer(args) for _ in range(1 if args.compile else args.layers)]
    norm = torch.ones(args.width, dtype=torch.bfloat16, device=CUDA)
    for rows in args.tokens:
        measure(rows, layers, norm, args)


def measure(rows: int, layers: list[Experts], norm: Tensor, args: argparse.Namespace) -> None:
    """Print the times of `rows` tokens."""
    xs = streams(rows, args)
    normed = [Normed(x.hidden, x.hidden, None, 1e-6) for x in xs]
    is_few = has_few_tokens(xs[0], layers[0])
    if is_few:
        used = [int(route_triton(x, e).used) for x, e in zip(xs, layers, strict=False)]
    else:
        sizes = [group_triton(x, e).sizes for x, e in zip(normed, layers, strict=False)]
        used = [int(s.count_nonzero()) for s in sizes]
        print(f"at most {max(int(s.max()) for s in sizes)} pairs an expert")
    bytes_a_number = 2 if args.weights == "plain" else 0.5 + 1 / 32
    bytes_read = 3 * args.width * args.features * bytes_a_number * sum(used) / len(used)
    print(f"{rows} tokens: {sum(used) / len(used):.1f} experts, {bytes_read / 1e6:.1f} MB")

    def timed(name: str, step: Callable[[int], object], share: float = 1.0) -> None:
        try:
            step(0)
            torch.cuda.synchronize()
            if args.compile:
                return
            us = median(graph_times(step, len(layers), 20))
        except Exception as problem:  # the configuration does not fit
            print(f"  {name}: {type(problem).__name__} {str(problem)[:80]}", flush=True)
            return
        rate = share * bytes_read / us / 1e6
        print(f"  {us:7.2f} us {rate:5.2f} TB/s  {name}", flush=True)

    (measure_few if is_few else measure_groups)(xs, layers, norm, timed)
    if rows > 8 and args.weights == "plain":
        timed(
            "sorted, by the library",
            lambda n: sorted_mixture_add_norm(normed[n], layers[n], normed[n].hidden, norm, 1e-6),
        )


def measure_few(
    xs: list[Normed], layers: list[Experts], norm: Tensor, timed: Callable[..., None]
) -> None:
    way = way_of(layers[0].gate_up, layers[0].down)
    chosen = choose_expert_tiles(len(xs[0].hidden), 2, way)
    is_tiled = way == "tiled"

    def run(n: int, gate_up: ExpertTiles, down: ExpertTiles | None) -> object:
        plan = route_triton(xs[n], layers[n])
        inner = gate_up_triton(xs[n].scaled, plan, layers[n], gate_up)
        if down is None:
            return inner
        hidden = xs[n].hidden
        return down_add_norm_triton(inner, plan, layers[n], down, hidden, norm, 1e-6)

    timed("router", lambda n: route_triton(xs[n], layers[n]), 0)
    timed(f"gate_up {tuple(chosen[0])}", lambda n: run(n, chosen[0], None), 2 / 3)
    timed(f"all, down {tuple(chosen[1])}", lambda n: run(n, *chosen))
    for tiles in MXFP4_GATE_UP if is_tiled else GATE_UP[chosen[0].block_m]:
        timed(f"gate_up {tuple(tiles)}", lambda n, t=tiles: run(n, t, None), 2 / 3)
    for tiles in MXFP4_DOWN if is_tiled else DOWN[chosen[0].block_m]:
        timed(f"all, down {tuple(tiles)}", lambda n, t=tiles: run(n, chosen[0], t))


def measure_groups(
    xs: list[Normed], layers: list[Experts], norm: Tensor, timed: Callable[..., None]
) -> None:
    first = layers[0]
    sizes = len(xs[0].hidden), first.routing.num_chosen, first.num_experts
    way = way_of(first.gate_up, first.down)
    chosen = choose_group_tiles(*sizes, 2, way=way)
    if chosen is None:
        return

    def run(n: int, gate_up: GroupTiles, down: GroupTiles | None) -> object:
        x = Normed(xs[n].hidden, xs[n].hidden, None, 1e-6)
        groups = group_triton(x, layers[n])
        if down is None:
            return grouped_product(x.scaled, groups, layers[n], gate_up, is_gate=True)
        return grouped_mixture_add_norm(x, groups, layers[n], (gate_up, down), x.hidden, norm, 1e-6)

    timed("router", lambda n: group_triton(xs[n], layers[n]), 0)
    timed(f"gate_up {tuple(chosen[0])}", lambda n: run(n, chosen[0], None), 2 / 3)
    timed(f"all, down {tuple(chosen[1])}", lambda n: run(n, *chosen))
    grouped = GROUPED_GATE_UP, GROUPED_DOWN
    if way == "tiled":
        grouped = [t._replace(block_n=t.block_n // 2) for t in MXFP4_GROUPED], MXFP4_GROUPED
    for tiles in grouped[0]:
        timed(f"gate_up {tuple(tiles)}", lambda n, t=tiles: run(n, t, None), 2 / 3)
    for tiles in grouped[1]:
        timed(f"all, down {tuple(tiles)}", lambda n, t=tiles: run(n, chosen[0], t))


if __name__ == "__main__":
    main()
