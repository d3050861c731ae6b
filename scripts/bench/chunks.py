"""Time attention over chunks of prompts: our kernels, and torch's.

    PYTHONPATH=.:kernels python scripts/bench/chunks.py

Needs a CUDA device. Heads are those of an 8B model: 32 of queries, 8 of keys. Prints one Markdown
row per shape and head dimension, microseconds (TFLOP/s) in a CUDA graph:

- "ours": `paged_attention_triton`, and with tiles of 64 rows.
- "dense": `dense_attention` with each of its tiles, a launch a sequence, gathering included.
- "FlashAttention 2": torch's, over contiguous keys without a gather.
- "cuDNN": torch's, over contiguous keys without a gather; only where no keys are older.

"fastest" is the fastest of our own; `attention.chunks.BOUNDS` and the tiles are set from this
table. "host" is the host's time to queue one layer's dense attention, "worst" the largest
difference from ours.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from graph_times import alternated_times
from kernel_times import BLOCK_SIZE, Batch, error_of
from specdec_kernels.attention.call import AttentionCall, LayerCache
from specdec_kernels.attention.dense_triton import TILES, DenseTiles, dense_attention_triton
from specdec_kernels.attention.paged_triton import paged_attention_triton
from specdec_kernels.attention.reference import gather_kv
from torch import Tensor

HEADS, KV_HEADS = 32, 8
SHAPES = ["1x511x511", "1x1024x1024", "1x1536x1536", "1x2047x2047", "1x2048x2448", "1x2048x4096"]
SHAPES += ["1x2048x7900", "1x1024x7900", "1x511x7900", "4x511x511", "4x1024x1024", "4x511x2048"]
DENSE = [*TILES.values(), DenseTiles(128, 128, 8, 2), DenseTiles(64, 128, 4, 2)]
USED = ["ours", "ours, 64 rows", *(f"dense {tuple(tiles)}" for tiles in DENSE)]
NAMES = [*USED, "FlashAttention 2", "cuDNN"]
HEAD = ["D", "queries of context", *NAMES, "fastest", "host us", "worst"]

Step = Callable[[int], Tensor]


def steps_of(batch: Batch, dim: int) -> dict[str, Step]:
    """Calls by name, over the same queries. torch's own kernels get other keys."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device="cuda").bfloat16()

    sequences, queries, context = batch.sequences, batch.queries, batch.context
    pools = [normal(batch.num_blocks, BLOCK_SIZE, KV_HEADS, dim) for _ in range(2)]
    cache = LayerCache(*pools)
    query = normal(batch.rows, HEADS, dim)
    keys, values = (normal(sequences * context, KV_HEADS, dim) for _ in range(2))
    scale = dim**-0.5
    call = AttentionCall(scale)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * context

    def ours(_: int, tiles: tuple[int, int] | None = None) -> Tensor:
        where = batch.block_tables, batch.query_start, batch.context_lens
        return paged_attention_triton(query, cache, *where, queries, call, tiles=tiles)

    def dense(_: int, tiles: DenseTiles) -> Tensor:
        out = torch.empty_like(query)
        for b in range(sequences):
            kv = gather_kv(cache, batch.block_tables[b], context, query.dtype)
            rows = slice(b * queries, (b + 1) * queries)
            dense_attention_triton(query[rows], *kv, scale, out[rows], tiles)
        return out

    def flash(_: int) -> Tensor:
        where = batch.query_start, starts, queries, context
        found = torch.ops.aten._flash_attention_forward(
            query, keys, values, *where, 0.0, True, False, scale=scale
        )
        return found[0]

    def cudnn(_: int) -> Tensor:
        sizes = sequences, queries, -1, dim
        q, k, v = (x.view(sizes).transpose(1, 2) for x in (query, keys, values))
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        return cudnn(q, k, v, None, False, 0.0, True, False, scale=scale)[0]

    steps = [ours, partial(ours, tiles=(64, 64))]
    steps += [partial(dense, tiles=tiles) for tiles in DENSE]
    steps += [flash, cudnn] if queries == context else [flash]
    return dict(zip(NAMES, steps, strict=False))


def host_time(step: Step, calls: int) -> float:
    """The microseconds in which the host queues a call."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for number in range(calls):
        step(number)
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return took * 1e6 / calls


def line(batch: Batch, dim: int, repeats: int) -> list[str]:
    steps = steps_of(batch, dim)
    exact = steps["ours"](0).double()
    worst = max(error_of(steps[name](0), exact) for name in USED)
    for step in steps.values():
        step(0)
    host_us = host_time(steps[USED[-1]], 8)
    found = alternated_times(list(steps.values()), 8, repeats)
    times = dict(zip(steps, map(median, found), strict=True))
    older = batch.context - batch.queries
    pairs = batch.sequences * batch.queries * (older + (batch.queries + 1) / 2)
    flops = 4 * HEADS * dim * pairs
    cells = [f"{times[n]:.0f} ({flops / times[n] / 1e6:.0f})" if n in times else "" for n in NAMES]
    fastest = min(USED, key=lambda name: times[name])
    shape = f"{batch.sequences} x {batch.queries} of {batch.context}"
    return [str(dim), shape, *cells, fastest, f"{host_us:.0f}", f"{worst:.4f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="SEQUENCESxQUERIESxCONTEXT")
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    print(" | ".join(("", *HEAD, "")).strip())
    print("|" + "---|" * len(HEAD))
    for dim in arguments.dims:
        for shape in arguments.shapes:
            cells = line(Batch(*map(int, shape.split("x"))), dim, arguments.repeats)
            print(" | ".join(("", *cells, "")).strip(), flush=True)


if __name__ == "__main__":
    main()
