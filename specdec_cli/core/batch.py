"""Makes the tensors for one forward pass. Legend: B sequences, Q tokens per sequence, T packed
tokens in all."""

from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from specdec_kernels import ops

from specdec_cli.core.state import BatchState
from specdec_cli.core.types import Sequence


class Span(NamedTuple):
    """The tokens `seq.tokens[start:stop]`, which one pass feeds to a model."""

    seq: Sequence
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class ForwardBatch:
    """The tensors of a pass over T packed tokens of B sequences.

    token_ids, positions: int64 [T].
    slots: int64 [T], the flat position of each token in the cache, block * block_size + offset.
    query_start: int32 [B + 1], the index of each sequence's first packed token, and T at the end.
    context_lens: int32 [B], the number of tokens in the cache, including those of this pass.
    block_tables: int32 [B, length of the longest table].
    max_query_len: the largest number of tokens that a sequence may have in this pass.
    logit_rows: int64 [M], the indices of packed tokens that need logits; None if all do.
    plan: how to gather keys and values, on a CPU only; None elsewhere.
    chunks: how to process long chunks of prompts, on CUDA only; None if there are none.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    logit_rows: torch.Tensor | None
    plan: ops.GatherPlan | None
    chunks: ops.ChunkPlan | None = None


def packed_ids(spans: list[Span], shift: int = 0) -> torch.Tensor:
    """Join the tokens `seq.tokens[start + shift : stop + shift]` of all spans: int64 [T], on the
    host."""
    parts = [seq.packed(start + shift, stop + shift) for seq, start, stop in spans]
    return torch.frombuffer(bytearray().join(parts), dtype=torch.int64)


def make_batch(
    spans: list[Span], logits_per_span: list[int], block_size: int, device: torch.device
) -> ForwardBatch:
    """Make the tensors for a pass over `spans`. logits_per_span: for each span, how many of its
    last tokens need logits."""
    lengths, contexts = [s.length for s in spans], [s.stop for s in spans]
    query_start = [0, *accumulate(lengths)]
    rows = [
        row
        for end, count in zip(query_start[1:], logits_per_span, strict=True)
        for row in range(end - count, end)
    ]
    widest = max(len(s.seq.block_table) for s in spans)
    tables = [s.seq.block_table + [0] * (widest - len(s.seq.block_table)) for s in spans]

    def ints(values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    positions = torch.cat([torch.arange(s.start, s.stop) for s in spans])
    positions = positions.to(device, non_blocking=True)
    query_start_t = ints(query_start, torch.int32)
    context_lens = ints(contexts, torch.int32)
    block_tables = ints(tables, torch.int32)
    plan = None
    if device.type == "cpu":
        plan = ops.gather_plan(block_tables, query_start_t, context_lens, block_size)
    return ForwardBatch(
        token_ids=packed_ids(spans).to(device, non_blocking=True),
        positions=positions,
        slots=ops.slot_mapping(block_tables, query_start_t, positions, block_size),
        query_start=query_start_t,
        context_lens=context_lens,
        block_tables=block_tables,
        max_query_len=max(lengths),
        logit_rows=None if len(rows) == query_start[-1] else ints(rows, torch.int64),
        plan=plan,
        chunks=ops.plan_chunks(lengths, contexts, device, ops.bound_of(device)),
    )


@dataclass(frozen=True, slots=True)
class Rectangle:
    """The tokens of one pass of a round: Q tokens for each of the B slots of a `BatchState`.

    Token j of a slot is at position length + offset + j, where length is the number of tokens of
    the slot's sequence, less `before`. A token is live if the slot is active, the position is in
    0..max_len-1, and lens >= offset + j + margin (or lens is None). Other tokens are padding: their
    keys and values go to block 0, whose contents are ignored, and their logits are meaningless.

    token_ids: int64 [B, Q].
    lens: int64 [B], how many tokens each sequence proposes; None if this does not affect which
    tokens are live.
    margin: for example, 1 if all proposals of a sequence are live, and 2 if all but the last are.
    last_only: whether only the last token of each slot needs logits.
    first_logit: if not `last_only`, the index of the first token of a slot that needs logits.
    cached: int64 [B], how many tokens of each sequence are known to be in the model's cache. On a
    CPU they are left out of the pass. None if this is not known.
    before: int64 [B], how many positions each slot's tokens are moved back; None to move none.
    """

    token_ids: torch.Tensor  # int64 [B, Q]
    lens: torch.Tensor | None  # int64 [B], proposal lengths
    offset: int
    margin: int
    max_len: int
    last_only: bool
    cached: torch.Tensor | None = None
    first_logit: int = 0
    before: torch.Tensor | None = None

    @property
    def num_logits(self) -> int:
        """The number of logit rows per slot."""
        return 1 if self.last_only else self.token_ids.shape[1] - self.first_logit

    def lengths(self, state: BatchState) -> torch.Tensor:
        """Return the length of each sequence minus `before`: int64 [B]. Token j of a slot is at
        this length + offset + j."""
        return state.length if self.before is None else torch.sub(state.length, self.before)


class LiveRows(NamedTuple):
    """Maps the outputs of a pass over `live_batch` to their rows in those of a pass over
    `padded_batch`.

    logits: int64 [M], the index of each row of logits among all B * `Rectangle.num_logits` rows.
    tokens: int64 [T], the index of each token among all B * Q tokens.
    """

    logits: torch.Tensor
    tokens: torch.Tensor


def live_batch(
    what: Rectangle, state: BatchState, block_size: int, num_ids: int
) -> tuple[ForwardBatch, LiveRows]:
    """Make the tensors for a pass over only the live tokens of `what`, on a CPU. Tokens that are in
    the cache already are left out, and token ids are clamped to 0..num_ids-1.

    Also return how the outputs of this pass map to those of a pass over `padded_batch`.
    """
    batch, width = what.token_ids.shape
    lengths, active = what.lengths(state).tolist(), state.active.tolist()
    lens = None if what.lens is None else what.lens.tolist()
    cached = [0] * batch if what.cached is None else what.cached.tolist()
    tokens, tables = what.token_ids.tolist(), state.block_tables.numpy()
    fed: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    places: list[int] = []
    query_start, contexts = [0], [0] * batch
    for b in range(batch):
        first = lengths[b] + what.offset
        # The first `count` tokens are live, except the first `skip`: these have negative positions
        # or are in the cache already.
        count = min(width, what.max_len - first)
        if lens is not None:
            count = min(count, lens[b] - what.offset - what.margin + 1)
        skip = max(0, -first, cached[b] - first)
        # With `last_only`, logits are used only to draw proposals, and this sequence proposes none.
        is_unused = what.last_only and lens is not None and lens[b] == 0
        if not active[b] or count <= skip or is_unused:
            query_start.append(len(fed))
            continue
        for j in range(skip, count):
            column, inside = divmod(first + j, block_size)
            fed.append(min(max(tokens[b][j], 0), num_ids - 1))
            positions.append(first + j)
            slots.append(int(tables[b, column]) * block_size + inside)
            places.append(b * width + j)
        query_start.append(len(fed))
        contexts[b] = first + count
    rows, logit_places = None, places
    if what.last_only:
        logit_places = [b for b in range(batch) if query_start[b + 1] > query_start[b]]
        if len(logit_places) < len(fed):
            rows = torch.tensor([query_start[b + 1] - 1 for b in logit_places])
    elif first := what.first_logit:
        needed = [row for row, place in enumerate(places) if place % width >= first]
        rows = torch.tensor(needed, dtype=torch.int64)
        at = [divmod(places[row], width) for row in needed]
        logit_places = [b * what.num_logits + j - first for b, j in at]
    query_lens = [end - start for start, end in pairwise(query_start)]
    block_tables = state.block_tables[:, : -(-max(contexts) // block_size)]
    token_ids, places_in_text, slots_t = torch.tensor([fed, positions, slots], dtype=torch.int64)
    found = ForwardBatch(
        token_ids=token_ids,
        positions=places_in_text,
        slots=slots_t,
        query_start=torch.tensor(query_start, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=block_tables,
        max_query_len=width,
        logit_rows=rows,
        plan=ops.GatherPlan(block_tables, query_lens, contexts, block_size),
    )
    as_tensor = partial(torch.tensor, dtype=torch.int64)
    return found, LiveRows(as_tensor(logit_places), as_tensor(places))


def padded_batch(what: Rectangle, state: BatchState, block_size: int, num_ids: int) -> ForwardBatch:
    """Make the tensors for a pass over all tokens of `what`, including padding. Their shapes are
    fixed, as CUDA graphs require. Token ids are clamped to 0..num_ids-1."""
    count, width = what.token_ids.shape
    ids, positions, kv_slots, context_lens = ops.padded_pass(
        *(what.token_ids, what.lengths(state), what.lens, state.active, state.block_tables),
        *(what.offset, what.margin, block_size, what.max_len, num_ids),
    )
    query_start, rows = rectangle(count, width, what.num_logits, state.device)
    plan = None
    if state.device.type == "cpu":
        where = state.block_tables, query_start, context_lens
        plan = ops.gather_plan(*where, block_size, kv_slots)
    return ForwardBatch(
        token_ids=ids,
        positions=positions,
        slots=kv_slots,
        query_start=query_start,
        context_lens=context_lens,
        block_tables=state.block_tables,
        max_query_len=width,
        logit_rows=rows,
        plan=plan,
    )


@cache
def rectangle(
    count: int, width: int, num_logits: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `query_start` and `logit_rows`, as in `ForwardBatch`, for B = `count` sequences of
    Q = `width` tokens each, if the last `num_logits` tokens of each sequence need logits."""
    starts = width * torch.arange(count + 1, device=device)
    last = starts[1:, None] - torch.arange(num_logits, 0, -1, device=device)
    return starts.to(torch.int32), last.flatten() if num_logits < width else None
