"""Attention of long chunks of prompts over copies of their keys and values.

A chunk is the last tokens of a sequence's context. Blocks of the cache are too small for TMA, which
loads large tiles without the registers and the addresses of the warps that multiply. So a layer's
keys and values of one sequence are gathered first; that costs little where many queries read them.
Legend: T packed tokens, B sequences, H query heads, Hkv key heads, D features of a head, NB blocks
of BS slots, MB block-table columns, L tokens of a chunk.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.attention.call import AttentionCall
from specdec_kernels.attention.paged import paged_attention
from specdec_kernels.dispatch import kernel
from specdec_kernels.gpu import capability

HEAD_DIMS = (64, 128)
LONGEST = 32768  # tokens of a context that is gathered; it bounds memory


class Bound(NamedTuple):
    """The least chunk that gains by gathering."""

    queries: int
    scores: int
    """Queries times context."""


# By compute capability; other devices leave all sequences to `paged_attention`. On an H200 four
# chunks of 511 queries gain a quarter over 2048 keys each (heads of 128), and lose over 511.
BOUNDS = {(9, 0): Bound(448, 2**20)}


class Chunk(NamedTuple):
    """A long chunk of a pass."""

    sequence: int
    tokens: slice
    """Among the packed ones."""
    context: int


class Run(NamedTuple):
    """Sequences of a pass that follow each other and have no long chunk."""

    sequences: slice
    tokens: slice
    query_start: Tensor
    """[sequences + 1] int32, counted from the run's first token."""
    max_query_len: int


@dataclass(frozen=True)
class ChunkPlan:
    """The gathered chunks of a pass, for all of its layers. longest: tokens of one's context."""

    chunks: list[Chunk]
    runs: list[Run]
    longest: int


def bound_of(device: torch.device) -> Bound | None:
    """The least chunk that gains by gathering on a device, or None if none does."""
    return BOUNDS.get(capability(device)) if device.type == "cuda" else None


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
        is_long = queries >= bound.queries and queries * context >= bound.scores
        if is_long and context <= LONGEST:
            end_run()
            chunks.append(Chunk(b, slice(starts[b], starts[b + 1]), context))
        else:
            others.append(b)
    end_run()
    return ChunkPlan(chunks, runs, max(c.context for c in chunks)) if chunks else None


def takes_chunks(
    plan: ChunkPlan | None, key_cache: Tensor, value_cache: Tensor, call: AttentionCall
) -> bool:
    """Whether a layer's chunks can be gathered: 16 bits, and no mask but the causal one."""
    return (
        plan is not None
        and key_cache.dtype.itemsize == 2
        and key_cache.shape[3] in HEAD_DIMS
        and value_cache.shape == key_cache.shape
        and (call.sliding_window == 0 or call.sliding_window >= plan.longest)
        and call.causal
        and not call.softcap
        and call.sinks is None
    )


def attend_chunks(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    plan: ChunkPlan,
    call: AttentionCall,
) -> Tensor:
    """`ops.paged_attention` of a layer that `takes_chunks`.

    Args:
        query: [T, H, D], heads and features contiguous.
        key_cache, value_cache: [NB, BS, Hkv, D].
        block_tables: [B, MB] int32.
        context_lens: [B] int32.
        plan: Of the pass; every token belongs to one of its sequences.
        call: The layer's.

    Returns:
        [T, H, D], contiguous.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for run in plan.runs:
        out[run.tokens] = paged_attention(
            *(query[run.tokens], key_cache, value_cache, block_tables[run.sequences]),
            *(run.query_start, context_lens[run.sequences], run.max_query_len, call),
        )
    for sequence, tokens, context in plan.chunks:
        kv = gather_kv(key_cache, value_cache, block_tables[sequence], context)
        dense_attention(query[tokens], *kv, call.scale, out[tokens])
    return out


@kernel("specdec_kernels.attention.chunks_triton:gather_kv_triton")
def gather_kv(
    key_cache: Tensor, value_cache: Tensor, table: Tensor, context: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence's positions.

    Args:
        key_cache, value_cache: [NB, BS, Hkv, D].
        table: [MB] int32, the sequence's blocks.
        context: C, tokens of the sequence in the cache.

    Returns:
        Two of [C, Hkv, D], contiguous.
    """
    block_size = key_cache.shape[1]
    position = torch.arange(context, device=table.device)
    slots = table[position // block_size].long() * block_size + position % block_size
    keys, values = (c.reshape(-1, *c.shape[2:])[slots] for c in (key_cache, value_cache))
    return keys, values


@kernel("specdec_kernels.attention.dense_triton:dense_attention_triton")
def dense_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
    """Causal attention of the last L of C positions.

    Args:
        query: [L, H, D], heads and features contiguous; on CUDA 16 bits, D a power of 2, and Hopper
            or later.
        key, value: [C, Hkv, D], contiguous.
        scale: Factor on the scores, positive.
        out: [L, H, D], heads and features contiguous, written in place.
    """
    group, older = query.shape[1] // key.shape[1], key.shape[0] - query.shape[0]
    q, k, v = (x.float().transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(older + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(2)
    out.copy_((weights @ v).transpose(0, 1))
