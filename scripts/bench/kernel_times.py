"""Time the kernels of a decode pass against memory bandwidth, one by one and as whole passes.

    PYTHONPATH=.:kernels python scripts/bench/kernel_times.py --models 1b 8b --batches 1x1 1x6 16x1

Needs a CUDA device; weights are random and have the real shapes. Every time is of a CUDA graph over
buffers that together exceed the L2 cache. "attention within a pass" is the cost of attention per
layer, from passes with and without it. "copy" replaces attention by a kernel that only copies the
queries, and "read" by one that also reads the cache as early as it can. "bytes" counts weights and
the keys and values of the context; "of peak" is the time of moving them at the bandwidth of a
matrix-vector read, which the run measures first, over the measured time. "library" is the same step
with cuBLAS products and our small kernels for the rest. Errors are against fp64.
--weights times the products of layers alone, over weights that are stored in that form.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from graph_times import alternated_times, graph_times
from rates import read_rate
from shapes import MODELS, STORAGES, Model
from specdec_kernels import ops
from specdec_kernels.launch_triton import after_predecessor
from specdec_kernels.linear.reference import rms_norm_reference
from specdec_kernels.linear.stored import Storage, Stored
from torch import Tensor

BLOCK_SIZE = 16
EPS = 1e-5
L2_BYTES = 60e6
COPIED = 512  # elements per program of the kernel that only copies
READERS, READ = 128, 1 << 14  # programs of the kernel that also reads, elements per step


@dataclass(frozen=True)
class Row:
    name: str
    rows: int
    context: int
    microseconds: float
    num_bytes: float
    library: float | None = None
    error: float | None = None


def timed(step: Callable[[int], object], launches: int) -> float:
    """Median microseconds per call of `launches` calls in a graph, each called with its number."""
    step(0)
    return median(graph_times(step, launches, 5))


def wide(weight: Tensor | Stored) -> Tensor:
    return weight.plain(torch.float64) if isinstance(weight, Stored) else weight.double()


def error_of(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


class Bench:
    """Random tensors of one dtype, and the table rows measured with them. storage: of the weights
    of layers; None for plain ones."""

    def __init__(
        self, dtype: torch.dtype, in_fp8: bool = False, storage: Storage | None = None
    ) -> None:
        self.dtype, self.in_fp8, self.storage = dtype, in_fp8, storage
        self.rows: list[Row] = []

    def normal(self, *size: int, scale: float = 1.0) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device="cuda").normal_(std=scale)

    def weights(self, features: int, width: int) -> list[Tensor | Stored]:
        """Copies of weights, enough that none is still in the L2 cache when it is read again."""
        size, held = features * width * self.dtype.itemsize, self.storage
        if held is not None:
            size = held.num_bytes((features, width))
        copies = max(2, int(4 * L2_BYTES / size) + 1)
        plain = (self.normal(features, width, scale=width**-0.5) for _ in range(copies))
        return [weight if held is None else held.quantised(weight) for weight in plain]

    def product(
        self,
        name: str,
        weights: list[Tensor | Stored],
        rows: int,
        ours: Callable[[Any], Tensor],
        library: Callable[[Tensor], Tensor],
        expected: Tensor | None,
    ) -> None:
        launches, first = max(8, len(weights)), weights[0]
        plain = [weight for weight in weights if isinstance(weight, Tensor)]
        self.rows.append(
            Row(
                name,
                rows,
                0,
                timed(lambda i: ours(weights[i % len(weights)]), launches),
                first.num_bytes if isinstance(first, Stored) else first.nbytes,
                timed(lambda i: library(plain[i % len(plain)]), launches) if plain else None,
                None if expected is None else error_of(ours(first), expected),
            )
        )

    def products(self, name: str, model: Model, all_rows: list[int]) -> None:
        """Time a layer's four linear layers and the head, on a residual stream from a kernel."""
        width = model.hidden
        heads = (model.heads + 2 * model.kv_heads) * model.head_dim
        norm = 1 + self.normal(width, scale=0.1)
        square = self.normal(width, width, scale=width**-0.5)

        layers = {"qkv": self.weights(heads, width)}
        if self.storage is None:
            layers["head"] = self.weights(model.vocabulary, width)[:2]
        for label, weights in layers.items():
            for rows in all_rows:
                x = ops.linear_add_norm(
                    self.normal(rows, width), square, self.normal(rows, width), norm, EPS
                )
                normed = rms_norm_reference(x.hidden.double(), norm.double(), EPS)
                self.product(
                    f"{name} {label}",
                    weights,
                    rows,
                    lambda w, x=x: ops.norm_linear(x, w),
                    lambda w, x=x: F.linear(ops.rms_norm(x.hidden, norm, EPS), w),
                    # The head in fp64 would take 4 GB, and it is the same kernel.
                    F.linear(normed, wide(weights[0])) if label == "qkv" else None,
                )
        del layers, weights

        outs = self.weights(width, model.heads * model.head_dim)
        downs = self.weights(width, model.ffn)
        for label, weights in (("out", outs), ("down", downs)):
            for rows in all_rows:
                x, residual = self.normal(rows, weights[0].shape[-1]), self.normal(rows, width)
                self.product(
                    f"{name} {label}",
                    weights,
                    rows,
                    lambda w, x=x, r=residual: ops.linear_add_norm(x, w, r, norm, EPS).hidden,
                    lambda w, x=x, r=residual: F.linear(x, w) + r,
                    residual.double() + F.linear(x.double(), wide(weights[0])),
                )
        del outs, downs, weights

        weights = self.weights(2 * model.ffn, width)
        for rows in all_rows:
            x = ops.linear_add_norm(
                self.normal(rows, width), square, self.normal(rows, width), norm, EPS
            )
            normed = rms_norm_reference(x.hidden.double(), norm.double(), EPS)
            self.product(
                f"{name} gate_up",
                weights,
                rows,
                lambda w, x=x: ops.norm_gate_up(x, w),
                lambda w, x=x: ops.gate(F.linear(ops.rms_norm(x.hidden, norm, EPS), w)),
                ops.gate.reference(F.linear(normed, wide(weights[0]))),
            )

    def argmax(self, name: str, model: Model, all_rows: list[int]) -> None:
        for rows in all_rows:
            logits = [self.normal(rows, model.vocabulary) for _ in range(8)]
            time = timed(lambda i, z=logits: ops.greedy_argmax(z[i % 8]), 16)
            library = timed(lambda i, z=logits: z[i % 8].argmax(1), 16)
            size = logits[0].numel() * logits[0].itemsize
            self.rows.append(Row(f"{name} argmax", rows, 0, time, size, library))

    def ngrams(self, sequences: int, context: int) -> None:
        """Time the lookup of random texts' suffixes, which reads the whole text."""
        history = torch.randint(0, 32000, (sequences, context), dtype=torch.int32, device="cuda")
        rows = torch.arange(sequences, device="cuda")
        length, room = torch.full_like(rows, context), torch.full_like(rows, 5)
        time = timed(lambda _: ops.ngram_lookup(history, rows, length, room, 4, 1, 5), 16)
        self.rows.append(Row("ngram lookup", sequences, context, time, 4 * history.numel()))

    def attention(self, name: str, model: Model, batch: "Batch") -> None:
        size = batch.cache_bytes(model, ops.FP8 if self.in_fp8 else self.dtype)
        copies = max(2, min(16, int(4 * L2_BYTES / size) + 1))
        caches = [self.cache(model, batch) for _ in range(copies)]
        width = (model.heads + 2 * model.kv_heads) * model.head_dim
        qkv = self.normal(batch.rows, width)
        cos, sin = self.rotation(model, batch)
        query = self.normal(batch.rows, model.heads, model.head_dim)

        def ours(number: int) -> Tensor:
            return batch.attend(qkv, cos, sin, caches[number % copies])

        def library(number: int) -> Tensor:
            return ops.paged_attention(
                query,
                caches[number % copies],
                batch.block_tables,
                batch.query_start,
                batch.context_lens,
                batch.queries,
                ops.AttentionCall(model.head_dim**-0.5),
            )

        error = None
        if size < 1e8:  # the reference is slow
            error = error_of(ours(0), batch.expected(qkv, cos, sin, caches[0]))
        times = timed(ours, 16), timed(library, 16)
        label = f"{name} attention {batch.sequences}x{batch.queries}"
        self.rows.append(Row(label, batch.rows, batch.context, times[0], size, times[1], error))

    def cache(self, model: Model, batch: "Batch") -> ops.LayerCache:
        shape = (batch.num_blocks, BLOCK_SIZE, model.kv_heads, model.head_dim)
        pools = [self.normal(*shape) for _ in range(2)]
        if not self.in_fp8:
            return ops.LayerCache(*pools)
        scales = torch.ones(2, model.kv_heads, device="cuda")
        return ops.LayerCache(*(pool.to(ops.FP8) for pool in pools), scales)

    def rotation(self, model: Model, batch: "Batch") -> tuple[Tensor, Tensor]:
        power = torch.arange(0, model.head_dim, 2, device="cuda") / model.head_dim
        angle = batch.positions[:, None] * 500000**-power
        angle = torch.cat([angle, angle], 1)
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def passes(self, name: str, model: Model, batches: list["Batch"]) -> None:
        """Time all layers, the head and the argmax as one graph."""
        width, heads = model.hidden, (model.heads + 2 * model.kv_heads) * model.head_dim
        norm = 1 + self.normal(width, scale=0.1)
        layers = [
            [
                self.normal(*size, scale=size[1] ** -0.5)
                for size in (
                    (heads, width),
                    (width, model.heads * model.head_dim),
                    (2 * model.ffn, width),
                    (width, model.ffn),
                )
            ]
            for _ in range(model.layers)
        ]
        head = self.normal(model.vocabulary, width, scale=width**-0.5)
        weight_bytes = sum(w.numel() for layer in layers for w in layer) + head.numel()
        weight_bytes *= self.dtype.itemsize
        for batch in batches:
            caches = [self.cache(model, batch) for _ in layers]
            weights = list(zip(layers, caches, strict=True))
            hidden = self.normal(batch.rows, width)
            rotation = self.rotation(model, batch)
            moved = weight_bytes + model.layers * batch.cache_bytes(
                model, ops.FP8 if self.in_fp8 else self.dtype
            )
            arguments = (hidden, weights, head, norm, batch, rotation)
            forwards = [
                lambda _, *, attend=attend, arguments=arguments: fused_pass(attend, *arguments)
                for attend in (attended, copied, reading, untouched)
            ]
            forwards.append(lambda _, *, arguments=arguments: library_pass(*arguments))
            for forward in forwards:
                forward(0)
            times = alternated_times(forwards, 1, 15)
            whole, copying, with_reads, stubbed, library = (median(found) for found in times)
            size = f"{batch.sequences}x{batch.queries}"
            self.rows.append(
                Row(f"{name} pass {size}", batch.rows, batch.context, whole, moved, library)
            )
            # The cost of attention per layer among other kernels, which overlap with it.
            read = batch.cache_bytes(model, ops.FP8 if self.in_fp8 else self.dtype)
            for kernel, time, num_bytes in (
                ("attention", whole, read),
                ("copy", copying, 0),
                ("read", with_reads, read),
            ):
                label = f"{name} {kernel} within a pass {size}"
                cost = (time - stubbed) / model.layers
                self.rows.append(Row(label, batch.rows, batch.context, cost, num_bytes))


class Batch:
    """Sequences with one context length. Their last positions are the queries."""

    def __init__(self, sequences: int, queries: int, context: int) -> None:
        self.sequences, self.queries, self.context = sequences, queries, context
        self.rows = sequences * queries
        blocks = -(-context // BLOCK_SIZE)
        self.num_blocks = sequences * blocks + 1
        order = torch.randperm(sequences * blocks, device="cuda", dtype=torch.int32) + 1
        # Wide enough for a context of 128k tokens.
        self.block_tables = torch.zeros(sequences, 8192, dtype=torch.int32, device="cuda")
        self.block_tables[:, :blocks] = order.view(sequences, blocks)
        starts = torch.arange(0, self.rows + 1, queries, dtype=torch.int32, device="cuda")
        self.query_start = starts
        self.context_lens = torch.full((sequences,), context, dtype=torch.int32, device="cuda")
        position = torch.arange(context - queries, context, device="cuda")
        slots = self.block_tables[:, position // BLOCK_SIZE].long() * BLOCK_SIZE
        self.slots = (slots + position % BLOCK_SIZE).flatten()
        self.positions = position.repeat(sequences)

    def cache_bytes(self, model: Model, dtype: torch.dtype) -> int:
        tokens = self.sequences * self.context
        return tokens * 2 * model.kv_heads * model.head_dim * dtype.itemsize

    def attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: ops.LayerCache) -> Tensor:
        return ops.rope_attention(
            qkv,
            cos,
            sin,
            cache,
            self.slots,
            self.block_tables,
            self.query_start,
            self.context_lens,
            self.queries,
            ops.AttentionCall(cos.shape[1] ** -0.5),
        )

    def expected(self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: ops.LayerCache) -> Tensor:
        """The result of the function's reference on the CPU, in fp64."""
        tensors = [t.cpu().double() for t in (qkv, cos, sin)]
        wide = ops.LayerCache(*(None if t is None else t.cpu() for t in cache))
        if cache.scales is None:
            wide = ops.LayerCache(wide.keys.double(), wide.values.double())
        indices = (self.slots, self.block_tables, self.query_start, self.context_lens)
        call = ops.AttentionCall(cos.shape[1] ** -0.5)
        out = ops.rope_attention(*tensors, wide, *(t.cpu() for t in indices), self.queries, call)
        return out.cuda()


Layer = tuple[list[Tensor], ops.LayerCache]


Attend = Callable[[Batch, Tensor, tuple[Tensor, Tensor], ops.LayerCache], Tensor]


def attended(
    batch: Batch, qkv: Tensor, rotation: tuple[Tensor, Tensor], cache: ops.LayerCache
) -> Tensor:
    return batch.attend(qkv, *rotation, cache)


def untouched(
    batch: Batch, qkv: Tensor, rotation: tuple[Tensor, Tensor], cache: ops.LayerCache
) -> Tensor:
    """A replacement of attention without a kernel: a view of the projection's output."""
    width = qkv.shape[1] - 2 * cache[0].shape[2] * cache[0].shape[3]
    return qkv.view(-1)[: batch.rows * width].view(batch.rows, width)


def copied(
    batch: Batch, qkv: Tensor, rotation: tuple[Tensor, Tensor], cache: ops.LayerCache
) -> Tensor:
    """A replacement of attention that only copies."""
    numbers = untouched(batch, qkv, rotation, cache)
    out = torch.empty_like(numbers)
    programs = triton.cdiv(numbers.numel(), COPIED)
    copy_kernel[(programs,)](numbers, out, numbers.numel(), COUNT=COPIED, launch_pdl=True)
    return out


@triton.jit
def copy_kernel(numbers_ptr, out_ptr, numbers, COUNT: tl.constexpr):
    after_predecessor(True)
    place = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    there = place < numbers
    tl.store(out_ptr + place, tl.load(numbers_ptr + place, mask=there), mask=there)


def reading(
    batch: Batch, qkv: Tensor, rotation: tuple[Tensor, Tensor], cache: ops.LayerCache
) -> Tensor:
    """A replacement of attention that reads the cache before it waits, and copies."""
    numbers = untouched(batch, qkv, rotation, cache)
    out = torch.empty_like(numbers)
    pools = [pool.view(torch.int8) if pool.dtype == ops.FP8 else pool for pool in cache[:2]]
    read_kernel[(READERS,)](
        *(*pools, numbers, out, pools[0].numel(), numbers.numel()),
        COUNT=COPIED,
        TILE=READ,
        num_warps=8,
        launch_pdl=True,
    )
    return out


@triton.jit
def read_kernel(
    keys_ptr,
    values_ptr,
    numbers_ptr,
    out_ptr,
    cached,
    numbers,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    inside = tl.arange(0, TILE)
    total = tl.zeros([TILE], keys_ptr.dtype.element_ty)
    for start in tl.range(program * TILE, cached, tl.num_programs(0) * TILE, num_stages=3):
        there = start + inside < cached
        total += tl.load(keys_ptr + start + inside, mask=there, other=0.0)
        total += tl.load(values_ptr + start + inside, mask=there, other=0.0)
    nearly_nothing = tl.sum(total.to(tl.float32)) * 1e-30  # keeps the loads alive
    after_predecessor(True)
    for start in range(program * COUNT, numbers, tl.num_programs(0) * COUNT):
        place = start + tl.arange(0, COUNT)
        number = tl.load(numbers_ptr + place).to(tl.float32) + nearly_nothing
        tl.store(out_ptr + place, number.to(out_ptr.dtype.element_ty))


def fused_pass(
    attend: Attend,
    hidden: Tensor,
    layers: list[Layer],
    head: Tensor,
    norm: Tensor,
    batch: Batch,
    rotation: tuple[Tensor, Tensor],
) -> Tensor:
    x = ops.Normed(hidden, ops.rms_norm(hidden, norm, EPS), None, EPS)
    for (qkv, out, gate_up, down), cache in layers:
        values = attend(batch, ops.norm_linear(x, qkv), rotation, cache)
        x = ops.linear_add_norm(values, out, x.hidden, norm, EPS)
        inner = ops.norm_gate_up(x, gate_up)
        x = ops.linear_add_norm(inner, down, x.hidden, norm, EPS)
    return ops.greedy_argmax(ops.norm_linear(x, head))


def library_pass(
    hidden: Tensor,
    layers: list[Layer],
    head: Tensor,
    norm: Tensor,
    batch: Batch,
    rotation: tuple[Tensor, Tensor],
) -> Tensor:
    """A pass with cuBLAS products and our kernels for the rest."""
    x = hidden
    for (qkv, out, gate_up, down), cache in layers:
        projected = F.linear(ops.rms_norm(x, norm, EPS), qkv)
        x = F.linear(batch.attend(projected, *rotation, cache), out) + x
        x = F.linear(ops.gate(F.linear(ops.rms_norm(x, norm, EPS), gate_up)), down) + x
    return F.linear(ops.rms_norm(x, norm, EPS), head).argmax(1)


def table(rows: list[Row], bandwidth: float) -> str:
    head = ("kernel", "rows", "context", "us", "MB", "of peak", "library us", "error")
    lines = [head]
    for row in rows:
        floor = row.num_bytes / bandwidth / 1e6
        lines.append(
            (
                row.name,
                str(row.rows),
                str(row.context or ""),
                f"{row.microseconds:.2f}",
                f"{row.num_bytes / 1e6:.1f}",
                f"{floor / row.microseconds:.0%}",
                "" if row.library is None else f"{row.library:.2f}",
                "" if row.error is None else f"{row.error:.1e}",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["1b", "8b"])
    batches = ["1x1", "1x2", "1x6", "8x1", "16x1", "32x1", "8x6"]
    parser.add_argument("--batches", nargs="+", default=batches, metavar="SEQUENCESxQUERIES")
    parser.add_argument("--contexts", nargs="+", type=int, default=[300, 4096])
    parts = ["products", "argmax", "ngrams", "attention", "passes"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--cache", default="auto", choices=["auto", "fp8"])
    parser.add_argument("--weights", choices=STORAGES, help="stored, as this kind")
    arguments = parser.parse_args()
    storage = STORAGES.get(arguments.weights)
    if storage is not None:
        arguments.parts = ["products"]

    torch.manual_seed(0)
    bandwidth = read_rate(graph_times)
    print(f"a matrix-vector read at {bandwidth:.2f} TB/s")
    bench = Bench(getattr(torch, arguments.dtype), arguments.cache == "fp8", storage)
    sizes = [tuple(map(int, batch.split("x"))) for batch in arguments.batches]
    rows = sorted({sequences * queries for sequences, queries in sizes})
    if "ngrams" in arguments.parts:
        for sequences in sorted({size[0] for size in sizes}):
            for context in arguments.contexts:
                bench.ngrams(sequences, context)
    for name in arguments.models:
        model = MODELS[name]
        all_batches = [Batch(*size, context) for context in arguments.contexts for size in sizes]
        if "products" in arguments.parts:
            bench.products(name, model, rows)
        if "argmax" in arguments.parts:
            bench.argmax(name, model, rows)
        if "attention" in arguments.parts:
            for batch in all_batches:
                bench.attention(name, model, batch)
        if "passes" in arguments.parts:
            bench.passes(name, model, all_batches)
    print(table(bench.rows, bandwidth))


if __name__ == "__main__":
    main()
