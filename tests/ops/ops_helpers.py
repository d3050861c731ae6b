"""Shared parts of tests of several ops: skips, row starts, named errors, a paged KV pool."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from specdec_kernels.attention.call import FP8, AttentionCall, LayerCache
from torch import Tensor

CUDA = torch.cuda.is_available()
no_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device, and there is none")


def needs_cuda(test: Callable[..., None]) -> Callable[..., None]:
    marked: Callable[..., None] = pytest.mark.gpu(no_cuda(test))
    return marked


DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    # Triton's interpreter computes bf16 dot products wrongly, without an error.
    pytest.param(torch.bfloat16, id="bf16", marks=[pytest.mark.gpu, no_cuda]),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def assert_close(name: str, expected: Tensor, actual: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape, f"{name}: {actual.shape}, expected {expected.shape}"
    assert actual.isfinite().all(), f"{name}: not finite"
    difference = (actual.double() - expected.double()).norm()
    error = float(difference / expected.double().norm().clamp_min(1e-30))
    assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"


def normal(*size: int, dtype: torch.dtype = torch.float32, device: object = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(size, generator=generator).to(device, dtype)  # type: ignore[call-overload]


def starts_of(lens: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention problem: B sequences of `contexts` tokens, `queries` of them new."""

    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    dk: int = 16
    dv: int = 16
    block_size: int = 8
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    padding: int = 0
    """Tokens of the query past the last sequence."""
    causal: bool = True
    dead: tuple[int, ...] = ()
    """Queries at each sequence's end that are padding; none where empty."""

    def __str__(self) -> str:
        numbers = ",".join(f"{q}of{c}" for q, c in zip(self.queries, self.contexts, strict=True))
        text = f"{numbers}-H{self.heads}:{self.kv_heads}-D{self.dk}:{self.dv}-BS{self.block_size}"
        text += f"-W{self.window}" if self.window else ""
        text += f"-cap{self.softcap:g}" if self.softcap else ""
        text += "-sinks" if self.sinks else ""
        text += "" if self.causal else "-bidirectional"
        text += "-dead" + ",".join(map(str, self.dead)) if self.dead else ""
        return text + (f"-pad{self.padding}" if self.padding else "")


@dataclass(frozen=True)
class Problem:
    """Tensors of one attention problem, named like the arguments of `ops.paged_attention`."""

    query: Tensor
    cache: LayerCache
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    max_query_len: int
    call: AttentionCall
    slots: Tensor

    def double(self) -> "Problem":
        """The same values in fp64, for a reference without rounding."""
        cache = plain(self.cache)
        sinks = None if self.call.sinks is None else self.call.sinks.double()
        call = self.call._replace(sinks=sinks)
        return replace(self, query=self.query.double(), call=call, cache=cache)


def plain(cache: LayerCache) -> LayerCache:
    """The numbers of a cache in fp64."""
    keys, values = cache.keys.double(), cache.values.double()
    if cache.scales is not None:
        keys, values = (x * s[:, None] for x, s in zip((keys, values), cache.scales, strict=True))
    return LayerCache(keys, values)


def rounded(x: Tensor, scales: Tensor) -> Tensor:
    """Heads [..., Hkv, D] as numbers of a cache in fp8 with scales [Hkv], in fp64."""
    return (x / scales[:, None]).clamp(-448, 448).to(FP8).double() * scales[:, None]


def in_fp8(cache: LayerCache) -> LayerCache:
    """A cache in fp8 of about the same numbers, with scales of every order."""
    heads = cache.keys.shape[2]
    powers = torch.rand(2, heads, generator=torch.Generator().manual_seed(heads)) * 5 - 4
    scales = (10**powers).to(cache.keys.device)
    keys, values = (
        (x.double() / s[:, None]).clamp(-448, 448).to(FP8)
        for x, s in zip(cache[:2], scales, strict=True)
    )
    return LayerCache(keys, values, scales)


def make_problem(shape: Shape, dtype: torch.dtype, device: torch.device) -> Problem:
    """Random keys and values in shuffled blocks, with NaN in every slot that no query may read.

    Padding has slots of the trash block, as in a padded pass.

    Table entries past a sequence's blocks point at the trash block, which holds NaN too.
    """
    generator = torch.Generator().manual_seed(len(str(shape)) + sum(shape.contexts))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    bs = shape.block_size
    counts = [-(-context // bs) for context in shape.contexts]
    columns = max(counts) + 2
    order = torch.randperm(sum(counts) + 3, generator=generator) + 1
    caches = [
        torch.full((len(order) + 1, bs, shape.kv_heads, dim), float("nan"))
        for dim in (shape.dk, shape.dv)
    ]
    tables = torch.zeros(len(counts), columns, dtype=torch.int32)
    tokens = sum(shape.queries) + shape.padding
    slots = torch.zeros(tokens, dtype=torch.int64)
    dead = shape.dead or (0,) * len(counts)
    used = done = 0
    for b, count in enumerate(counts):
        tables[b, :count] = order[used : used + count]
        used += count
        oldest = 0
        if shape.window:
            oldest = max(0, shape.contexts[b] - shape.queries[b] - shape.window + 1)
        position = torch.arange(oldest, shape.contexts[b] - dead[b])
        block = tables[b, position // bs].long()
        for cache in caches:
            cache[block, position % bs] = normal(len(position), *cache.shape[2:])
        new = torch.arange(
            max(0, shape.contexts[b] - shape.queries[b]), shape.contexts[b] - dead[b]
        )
        done += shape.queries[b]
        begin = done - dead[b] - len(new)
        slots[begin : begin + len(new)] = tables[b, new // bs].long() * bs + new % bs
    return Problem(
        query=normal(tokens, shape.heads, shape.dk).to(device, dtype),
        cache=LayerCache(*(cache.to(device, dtype) for cache in caches)),
        block_tables=tables.to(device),
        query_start=starts_of(list(shape.queries), device),
        context_lens=torch.tensor(shape.contexts, dtype=torch.int32, device=device),
        max_query_len=max(shape.queries),
        call=AttentionCall(
            scale=shape.dk**-0.5,
            sliding_window=shape.window,
            softcap=shape.softcap,
            sinks=normal(shape.heads).to(device, dtype) if shape.sinks else None,
            causal=shape.causal,
        ),
        slots=slots.to(device),
    )


def with_meaning(problem: Problem) -> Tensor:
    """bool [T]: tokens that are no padding, and those past the last sequence, which give zeros."""
    place = torch.arange(len(problem.slots), device=problem.slots.device)
    return (problem.slots >= problem.cache.keys.shape[1]) | (place >= problem.query_start[-1])


def paged_attention_reference(
    query: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    call: AttentionCall,
    slots: Tensor,
) -> Tensor:
    """`ops.paged_attention`, one dot product at a time, in fp64; zeros for padding."""
    scale, window, softcap, sinks, causal = call
    key_cache, value_cache, _ = cache
    num_heads, block_size = query.shape[1], key_cache.shape[1]
    group = num_heads // key_cache.shape[2]
    out = query.new_zeros((query.shape[0], num_heads, value_cache.shape[3]))
    starts, contexts = query_start.tolist(), context_lens.tolist()
    is_live = (slots >= block_size).tolist()
    for b, context in enumerate(contexts):
        padding = [t for t in range(starts[b], starts[b + 1]) if not is_live[t]]
        hidden = {context - starts[b + 1] + token for token in padding}
        for token in range(starts[b], starts[b + 1]):
            position = context - starts[b + 1] + token
            if not is_live[token]:
                continue
            visible = [p for p in range(context) if p not in hidden]
            visible = [p for p in visible if not window or abs(p - position) < window]
            visible = [p for p in visible if not causal or p <= position]
            seen = torch.tensor(visible, device=query.device)
            block, inside = block_tables[b, seen // block_size].long(), seen % block_size
            for head in range(num_heads):
                keys = key_cache[block, inside, head // group].double()
                scores = keys @ query[token, head].double() * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                weights = torch.softmax(scores, 0)[: len(seen)]
                values = value_cache[block, inside, head // group].double()
                out[token, head] = (weights @ values).to(out.dtype)
    return out


def expected_of(problem: Problem) -> Tensor:
    arguments = dict(vars(problem.double()))
    del arguments["max_query_len"]
    return paged_attention_reference(**arguments)
