"""Attention of long chunks of prompts through torch's cuDNN kernels.

A chunk is the last tokens of a sequence's context. Its attention is merged from causal attention
over a square of the last positions and full attention over pieces of the positions before. The
square's first rows are no queries of the chunk, and what they give is not read.

cuDNN builds a plan for each shape that it meets, which takes the host some 50 ms. So the sides of
the square are multiples of SIDE, and pieces are multiples of WHOLE up to PIECE: few shapes, reused
by all layers and later passes. The square's last keys are zeros, which only rows past the chunk
see.
Legend: T packed tokens, H query heads, Hkv key heads, D features of a head, NB blocks of BS slots,
MB block-table columns, L tokens of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.attention.paged import paged_attention
from specdec_kernels.dispatch import kernel
from specdec_kernels.gpu import capability

SIDE = 256
WHOLE = 1024
PIECE = 8192  # bounds memory too: a piece's keys and values are copied
# Rows of memory around the queries of a pass that a square may begin or end in.
BEFORE, AFTER = WHOLE, SIDE
HEAD_DIMS = (64, 128)

# Attention of [1, H, S, D] over keys and values [1, Hkv, N, D], causal or not, with a factor on the
# scores: the output [1, H, S, D] and the logarithms [1, H, S] of the sums of exponentials, in fp32.
Attend = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
# Of a chunk: the output [L, H, D] and the logarithms [L, H].
Part = tuple[Tensor, Tensor]


class Bound(NamedTuple):
    """The least chunk that is faster through cuDNN."""

    queries: int
    scores: int
    """Queries times context."""


# By compute capability; other devices leave all sequences to our kernel.
BOUNDS = {(9, 0): Bound(1024, 2**20)}


class Rectangle(NamedTuple):
    """Rows of queries by keys that follow each other, of one call."""

    early: int
    """Rows before the chunk's first query; they and those after its last give nothing."""
    rows: int
    first_key: int
    keys: int
    is_causal: bool


class Chunk(NamedTuple):
    """A long chunk of a pass."""

    sequence: int
    first: int
    """Its first packed token."""
    queries: int
    context: int

    @property
    def square(self) -> Rectangle:
        """The part with the chunk's own keys."""
        whole, early = divmod(self.context - self.queries, WHOLE)
        side = rounded(early + self.queries)
        return Rectangle(early, side, whole * WHOLE, side, True)

    @property
    def pieces(self) -> list[Rectangle]:
        """The parts before, whose keys every query sees."""
        rows, whole = rounded(self.queries), self.square.first_key
        firsts = range(0, whole, PIECE)
        return [Rectangle(0, rows, first, min(PIECE, whole - first), False) for first in firsts]


class Run(NamedTuple):
    """Sequences of a pass that follow each other and have no long chunk."""

    sequences: slice
    tokens: slice
    query_start: Tensor
    """[sequences + 1] int32, counted from the run's first token."""
    max_query_len: int


@dataclass(frozen=True)
class ChunkPlan:
    """What of a pass goes to cuDNN, for all of its layers. longest: tokens of a chunk's context."""

    chunks: list[Chunk]
    runs: list[Run]
    longest: int


def rounded(rows: int) -> int:
    return -(-rows // SIDE) * SIDE


def bound_of(device: torch.device) -> Bound | None:
    """The least chunk of a device that is faster through cuDNN, or None if none is."""
    if device.type != "cuda" or not torch.backends.cudnn.is_available():
        return None
    return BOUNDS.get(capability(device))


def plan_chunks(
    query_lens: list[int], context_lens: list[int], device: torch.device, bound: Bound | None
) -> ChunkPlan | None:
    """The plan of a pass with a long chunk; None for others."""
    if bound is None or max(query_lens, default=0) < bound.queries:
        return None
    starts = [0, *accumulate(query_lens)]
    chunks: list[Chunk] = []
    runs: list[Run] = []
    others: list[int] = []

    def end_run() -> None:
        if others:
            begin, end = others[0], others[-1] + 1
            own = [start - starts[begin] for start in starts[begin : end + 1]]
            start = torch.tensor(own, dtype=torch.int32).to(device, non_blocking=True)
            sequences, tokens = slice(begin, end), slice(starts[begin], starts[end])
            runs.append(Run(sequences, tokens, start, max(query_lens[begin:end])))
            others.clear()

    for b, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        if queries >= bound.queries and queries * context >= bound.scores:
            end_run()
            chunks.append(Chunk(b, starts[b], queries, context))
        else:
            others.append(b)
    end_run()
    return ChunkPlan(chunks, runs, max(c.context for c in chunks)) if chunks else None


def takes_chunks(
    plan: ChunkPlan | None,
    key_cache: Tensor,
    value_cache: Tensor,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
) -> bool:
    """Whether a layer's attention is what cuDNN computes: 16 bits, and no mask but the causal."""
    return (
        plan is not None
        and key_cache.dtype.itemsize == 2
        and key_cache.shape[3] in HEAD_DIMS
        and value_cache.shape == key_cache.shape
        and (sliding_window == 0 or sliding_window >= plan.longest)
        and not softcap
        and sinks is None
    )


def room_for_queries(num_tokens: int, heads: int, dim: int, like: Tensor) -> Tensor:
    """[T, H, D], uninitialised, with BEFORE rows before it and AFTER rows after it in memory."""
    whole = torch.empty(
        (BEFORE + num_tokens + AFTER, heads, dim), dtype=like.dtype, device=like.device
    )
    return whole[BEFORE : BEFORE + num_tokens]


def cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """An `Attend` of torch, for CUDA and 16 bits."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, is_causal, False, scale=scale
    )
    return out, lse.flatten(2)


def attend_chunks(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    plan: ChunkPlan,
    scale: float,
    sliding_window: int = 0,
    attend: Attend = cudnn_attention,
) -> Tensor:
    """`ops.paged_attention` of a layer that `takes_chunks`.

    Args:
        query: [T, H, D] from `room_for_queries`.
        key_cache, value_cache: [NB, BS, Hkv, D].
        block_tables: [B, MB] int32.
        context_lens: [B] int32.
        plan: Of the pass; every token belongs to one of its sequences.
        scale: Factor on the scores.
        sliding_window: As in `ops.paged_attention`.
        attend: Computes both parts of a chunk.

    Returns:
        [T, H, D], contiguous.
    """
    caches = key_cache, value_cache, block_tables
    if not plan.runs and len(plan.chunks) == 1 and not plan.chunks[0].pieces:
        chunk = plan.chunks[0]
        return _part(query, *caches, chunk, chunk.square, scale, attend)[0].contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for run in plan.runs:
        out[run.tokens] = paged_attention(
            *(query[run.tokens], key_cache, value_cache, block_tables[run.sequences]),
            *(run.query_start, context_lens[run.sequences], scale, run.max_query_len),
            sliding_window,
        )
    for chunk in plan.chunks:
        own = out[chunk.first : chunk.first + chunk.queries]
        found, lse = _part(query, *caches, chunk, chunk.square, scale, attend)
        for piece in chunk.pieces:
            merge_parts(own, found, lse, *_part(query, *caches, chunk, piece, scale, attend))
            found = own
        if found is not own:
            own.copy_(found)
    return out


def _part(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    chunk: Chunk,
    part: Rectangle,
    scale: float,
    attend: Attend,
) -> Part:
    """Attention of a chunk over the keys of one of its rectangles."""
    table = block_tables[chunk.sequence]
    span = part.first_key, chunk.context, part.keys
    keys, values = gather_kv(key_cache, value_cache, table, *span)
    # The rows that are no queries of the chunk may be in the memory around the pass's queries.
    place = query.storage_offset() + (chunk.first - part.early) * query.stride(0)
    rows = query.as_strided((part.rows, *query.shape[1:]), query.stride(), place)
    q, k, v = (x.transpose(0, 1)[None] for x in (rows, keys, values))
    out, lse = attend(q, k, v, part.is_causal, scale)
    mine = slice(part.early, part.early + chunk.queries)
    return out[0].transpose(0, 1)[mine], lse[0].transpose(0, 1)[mine]


@kernel("specdec_kernels.attention.chunks_triton:gather_kv_triton")
def gather_kv(
    key_cache: Tensor, value_cache: Tensor, table: Tensor, first: int, context: int, length: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence's positions, and zeros from position `context` on.

    Args:
        key_cache, value_cache: [NB, BS, Hkv, D].
        table: [MB] int32, the sequence's blocks.
        first: Position of the first key.
        context: Tokens of the sequence in the cache.
        length: Positions of the result.

    Returns:
        Two of [length, Hkv, D], contiguous.
    """
    block_size = key_cache.shape[1]
    position = torch.arange(first, min(context, first + length), device=table.device)
    slots = table[position // block_size].long() * block_size + position % block_size
    found = []
    for cache in (key_cache, value_cache):
        made = cache.new_zeros(length, *cache.shape[2:])
        made[: len(slots)] = cache.reshape(-1, *cache.shape[2:])[slots]
        found.append(made)
    return found[0], found[1]


@kernel("specdec_kernels.attention.chunks_triton:merge_parts_triton")
def merge_parts(
    out: Tensor, first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor
) -> None:
    """Attention over two sets of keys from the results over each, in fp32.

    Args:
        out: [L, H, D], heads and features contiguous, written in place; it may be `first`.
        first, second: [L, H, D], features contiguous.
        first_lse, second_lse: [L, H] fp32, logarithms of the sums of exponentials; at least one of
            the two is finite. `first_lse` becomes that of both sets.
    """
    share = torch.sigmoid(second_lse - first_lse)[..., None]
    out.copy_(first.float() * (1 - share) + second.float() * share)
    first_lse.copy_(torch.logaddexp(first_lse, second_lse))
