"""The tensors of a ragged pass against plain Python over the same spans."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_cli.core.batch import ForwardBatch, Span, make_batch
from specdec_cli.core.types import Sequence

CPU = torch.device("cpu")
Case = tuple[list[Span], list[int], torch.Tensor, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Spans of random sequences with shuffled blocks; every one feeds at least one token."""
    block_size = draw(st.integers(1, 5))
    batch = draw(st.integers(1, 5))
    width = draw(st.integers(0, 4))
    blocks = draw(st.permutations(range(1, 200)))
    spans, logits = [], []
    for index in range(batch):
        length = draw(st.integers(1, 12))
        start = draw(st.integers(0, length))
        stop = draw(st.integers(start, length))
        extra = draw(st.integers(0, width)) if stop == length else 0
        if stop + extra == start:
            start, stop, extra = 0, length, 0
        tokens = [draw(st.integers(0, 96)) for _ in range(length)]
        needed = -(-(stop + extra) // block_size) + draw(st.integers(0, 2))
        table = [blocks.pop() for _ in range(needed)]
        seq = Sequence(index, tokens, 1, 99, block_table=table)
        spans.append(Span(seq, start, stop, extra))
        logits.append(draw(st.integers(0, spans[-1].length)))
    values = draw(st.lists(st.integers(100, 199), min_size=batch * width, max_size=batch * width))
    return spans, logits, torch.tensor(values, dtype=torch.int64).view(batch, width), block_size


def wanted(batch: ForwardBatch) -> list[int]:
    if batch.logit_rows is None:
        return list(range(len(batch.token_ids)))
    return batch.logit_rows.tolist()


@settings(max_examples=150, deadline=None)
@given(cases())
def test_against_plain_python(case: Case) -> None:
    spans, logits, extra_tokens, block_size = case
    extra = extra_tokens if extra_tokens.shape[1] else None
    batch = make_batch(spans, logits, block_size, CPU, extra)
    tokens, positions, slots, rows, starts = [], [], [], [], [0]
    for b, (span, count) in enumerate(zip(spans, logits, strict=True)):
        fed = span.seq.tokens[span.start : span.stop] + extra_tokens[b, : span.extra].tolist()
        for offset, token in enumerate(fed):
            position = span.start + offset
            tokens.append(token)
            positions.append(position)
            block = span.seq.block_table[position // block_size]
            slots.append(block * block_size + position % block_size)
        starts.append(len(tokens))
        rows += list(range(len(tokens) - count, len(tokens)))
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.query_start.tolist() == starts
    assert wanted(batch) == rows
    assert batch.context_lens.tolist() == [s.stop + s.extra for s in spans]
    assert batch.max_query_len == max(b - a for a, b in pairwise(starts))
    for span, row in zip(spans, batch.block_tables.tolist(), strict=True):
        table = span.seq.block_table
        assert row == table + [0] * (batch.block_tables.shape[1] - len(table))


def one(span: Span, count: int, extra: list[int] | None = None) -> ForwardBatch:
    given_tokens = None if extra is None else torch.tensor([extra])
    return make_batch([span], [count], 4, CPU, given_tokens)


@pytest.fixture
def seq() -> Sequence:
    return Sequence(0, [10, 11, 12, 13, 14, 15], 3, 20, block_table=[3, 1, 2])


def test_a_chunk_of_a_prompt_needs_no_logits(seq: Sequence) -> None:
    batch = one(Span(seq, 1, 5), 0)
    assert batch.token_ids.tolist() == [11, 12, 13, 14]
    assert batch.slots.tolist() == [13, 14, 15, 4]
    assert batch.logit_rows.tolist() == []


def test_scoring_feeds_the_last_token_and_the_proposals(seq: Sequence) -> None:
    batch = one(Span(seq, 5, 6, 3), 4, [90, 91, 92, 93])
    assert batch.token_ids.tolist() == [15, 90, 91, 92]
    assert batch.positions.tolist() == [5, 6, 7, 8]
    assert batch.slots.tolist() == [5, 6, 7, 8]
    assert batch.logit_rows is None, "all rows are wanted"


def test_a_draft_step_feeds_a_token_the_host_does_not_know(seq: Sequence) -> None:
    batch = one(Span(seq, 7, 7, 1), 1, [90])
    assert batch.token_ids.tolist() == [90]
    assert batch.positions.tolist() == [7]
    assert batch.context_lens.tolist() == [8]


def test_dtypes_are_what_the_kernels_take(seq: Sequence) -> None:
    batch = one(Span(seq, 0, 6), 1)
    for name in ("token_ids", "positions", "slots", "logit_rows"):
        assert getattr(batch, name).dtype == torch.int64, name
    for name in ("query_start", "context_lens", "block_tables"):
        assert getattr(batch, name).dtype == torch.int32, name
