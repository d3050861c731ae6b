"""One ragged forward pass: prefill, catch-up, decode and scoring are all this.

A pass feeds, for each sequence, some of its own tokens that are not in the model's cache yet and
then tokens that only the device knows (proposals). Knows nothing of models.
"""

from dataclasses import dataclass

import torch
from specdec_kernels import ops

from specdec_cli.core.types import Sequence


@dataclass(frozen=True, slots=True)
class Span:
    """Feed `seq.tokens[start:stop]`, then `extra` tokens that are given on the device."""

    seq: Sequence
    start: int
    stop: int
    extra: int = 0

    @property
    def length(self) -> int:
        return self.stop - self.start + self.extra

    @property
    def context(self) -> int:
        """Tokens in the cache after the pass."""
        return self.stop + self.extra


@dataclass(slots=True)
class ForwardBatch:
    """The tensors of a pass over T packed tokens of B sequences.

    token_ids, positions, slots: int64 [T]; slots are flat cache positions, block * block_size +
    offset. query_start: int32 [B + 1]. context_lens: int32 [B], tokens in the cache including
    this pass's. block_tables: int32 [B, widest]. logit_rows: int64 [M], the packed rows whose
    logits are wanted, None for all.
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


def make_batch(
    spans: list[Span],
    logits_per_span: list[int],
    block_size: int,
    device: torch.device,
    extra_tokens: torch.Tensor | None = None,
) -> ForwardBatch:
    """Build a pass over `spans`.

    logits_per_span: how many of each span's last tokens need logits.
    extra_tokens: int64 [B, K] on the device; span b takes the first `extra` of its row. The host
    never reads it.
    """
    lengths = [s.length for s in spans]
    query_start = _starts(lengths)
    positions = [p for s in spans for p in range(s.start, s.context)]
    own = [t for s in spans for t in s.seq.tokens[s.start : s.stop]]
    rows = [
        row
        for end, count in zip(query_start[1:], logits_per_span, strict=True)
        for row in range(end - count, end)
    ]
    widest = max(len(s.seq.block_table) for s in spans)
    tables = [s.seq.block_table + [0] * (widest - len(s.seq.block_table)) for s in spans]

    def ints(values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    query_start_t = ints(query_start, torch.int32)
    positions_t = ints(positions, torch.int64)
    context_lens = ints([s.context for s in spans], torch.int32)
    block_tables = ints(tables, torch.int32)
    token_ids = ints(own, torch.int64)
    if extra_tokens is not None and len({(s.stop - s.start, s.extra) for s in spans}) == 1:
        # Rows of one shape, as in most rounds, need no merging.
        own_rows = token_ids.view(len(spans), spans[0].stop - spans[0].start)
        token_ids = torch.cat((own_rows, extra_tokens[:, : spans[0].extra]), dim=1).view(-1)
    elif extra_tokens is not None:
        own_start = _starts([s.stop - s.start for s in spans])
        token_ids, _ = ops.merge_tokens(
            token_ids,
            ints(own_start, torch.int32),
            ints(own_start[1:], torch.int32),
            extra_tokens,
            ints([s.extra for s in spans], torch.int32),
            query_start_t,
            total=query_start[-1],
        )
    plan = None
    if device.type == "cpu":
        # The dozen operations of `ops.slot_mapping` take longer for the few tokens of a round.
        slots = ints(_slots(spans, block_size), torch.int64)
        plan = ops.gather_plan(block_tables, query_start_t, context_lens, block_size)
    else:
        slots = ops.slot_mapping(
            block_tables, query_start_t, positions_t, None, block_size, widest * block_size
        )
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions_t,
        slots=slots,
        query_start=query_start_t,
        context_lens=context_lens,
        block_tables=block_tables,
        max_query_len=max(lengths),
        logit_rows=None if len(rows) == query_start[-1] else ints(rows, torch.int64),
        plan=plan,
    )


def _slots(spans: list[Span], block_size: int) -> list[int]:
    """Where the tokens' keys go, as `ops.slot_mapping` says: those past a table to block 0."""
    slots = []
    for span in spans:
        table = span.seq.block_table
        for position in range(span.start, span.context):
            column, inside = divmod(position, block_size)
            slots.append((table[column] if column < len(table) else 0) * block_size + inside)
    return slots


def _starts(lengths: list[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts
