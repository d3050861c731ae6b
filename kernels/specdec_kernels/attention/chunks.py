"""Attention for long prompt chunks over contiguous copies of their keys and values.

TMA loads large tiles without occupying the warps that multiply. It cannot load them from the cache,
because a cache block is smaller than such a tile. Therefore, if many queries read one sequence's
keys and values, these are first gathered into contiguous memory.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.gpu import gpu_of

HEAD_DIMS = (64, 128)
LONGEST = 32768  # longest context that is gathered; this limits the memory for the copy


class Bound(NamedTuple):
    """The minimum size of a chunk for which gathering its keys and values is faster than reading
    them from the cache. A chunk must reach both minimums."""

    queries: int
    """Minimum number of queries."""
    scores: int
    """Minimum number of queries times context length."""


# Bounds by compute capability. Other devices use `paged_attention` for all sequences. On an H200
# with head dimension 128 and four chunks of 511 queries, gathering makes attention a quarter faster
# if each chunk has 2048 keys, but slower if each has 511.
BOUNDS = {(9, 0): Bound(448, 2**20)}


class LongChunk(NamedTuple):
    """A prompt chunk of one sequence that is long enough for gathering to be faster."""

    sequence: int
    tokens: slice
    """The indices of the chunk's tokens among the packed tokens."""
    context: int
    """The number of keys, including those of earlier chunks."""


class ShortRun(NamedTuple):
    """Consecutive sequences without long chunks; one call of `paged_attention` processes them."""

    sequences: slice
    tokens: slice
    query_start: Tensor
    """[sequences + 1] int32: where each sequence begins, counted from the run's first token."""
    max_query_len: int


@dataclass(frozen=True)
class ChunkPlan:
    """The sequences of a forward pass, divided into those with long chunks and runs of the others.
    All layers of the pass use the same plan."""

    chunks: list[LongChunk]
    runs: list[ShortRun]
    longest: int
    """The largest context length among `chunks`."""


def bound_of(device: torch.device) -> Bound | None:
    """Return the minimum size for which gathering is faster on a device, or None if it never is."""
    return BOUNDS.get(gpu_of(device).capability) if device.type == "cuda" else None


def plan_chunks(
    query_lens: list[int], context_lens: list[int], device: torch.device, bound: Bound | None
) -> ChunkPlan | None:
    """Return the plan of a forward pass, or None if no chunk is long enough to be gathered."""
    if bound is None or max(query_lens, default=0) < bound.queries:
        return None
    starts = [0, *accumulate(query_lens)]
    chunks: list[LongChunk] = []
    runs: list[ShortRun] = []
    others: list[int] = []

    def end_run() -> None:
        if others:
            begin, end = others[0], others[-1] + 1
            own = [start - starts[begin] for start in starts[begin : end + 1]]
            start = torch.tensor(own, dtype=torch.int32).to(device, non_blocking=True)
            sequences, tokens = slice(begin, end), slice(starts[begin], starts[end])
            runs.append(ShortRun(sequences, tokens, start, max(query_lens[begin:end])))
            others.clear()

    for b, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        is_long = queries >= bound.queries and queries * context >= bound.scores
        if is_long and context <= LONGEST:
            end_run()
            chunks.append(LongChunk(b, slice(starts[b], starts[b + 1]), context))
        else:
            others.append(b)
    end_run()
    return ChunkPlan(chunks, runs, max(c.context for c in chunks)) if chunks else None
