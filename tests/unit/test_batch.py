"""The tensors of a ragged pass against plain Python over the same spans."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_cli.core.batch import (
    ForwardBatch,
    LiveRows,
    Rectangle,
    Span,
    live_batch,
    make_batch,
    packed_ids,
    padded_batch,
    rectangle,
)
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import Sequence

CPU = torch.device("cpu")
Case = tuple[list[Span], list[int], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Spans of random sequences with shuffled blocks; every span feeds at least one token."""
    block_size = draw(st.integers(1, 5))
    batch = draw(st.integers(1, 5))
    blocks = draw(st.permutations(range(1, 200)))
    spans, logits = [], []
    for index in range(batch):
        length = draw(st.integers(1, 12))
        start = draw(st.integers(0, length))
        stop = draw(st.integers(start, length))
        if stop == start:
            start, stop = 0, length
        tokens = [draw(st.integers(0, 96)) for _ in range(length)]
        needed = -(-stop // block_size) + draw(st.integers(0, 2))
        table = [blocks.pop() for _ in range(needed)]
        seq = Sequence(index, tokens, 1, 99, block_table=table)
        spans.append(Span(seq, start, stop))
        logits.append(draw(st.integers(0, spans[-1].length)))
    return spans, logits, block_size


def wanted(batch: ForwardBatch) -> list[int]:
    if batch.logit_rows is None:
        return list(range(len(batch.token_ids)))
    return batch.logit_rows.tolist()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=2, max_size=9), st.data())
def test_ids_are_packed_also_of_tokens_that_came_later(tokens: list[int], data: Any) -> None:
    seq = Sequence(0, tokens[: data.draw(st.integers(0, len(tokens)))], 1, 99)
    seq.tokens.extend(tokens[len(seq.tokens) :])
    stop = data.draw(st.integers(1, len(tokens) - 1))
    spans = [Span(seq, data.draw(st.integers(0, stop - 1)), stop) for _ in range(2)]
    for shift in (0, 1):
        want = [t for s in spans for t in tokens[s.start + shift : s.stop + shift]]
        assert packed_ids(spans, shift).tolist() == want


@settings(max_examples=150, deadline=None)
@given(cases())
def test_against_plain_python(case: Case) -> None:
    spans, logits, block_size = case
    batch = make_batch(spans, logits, block_size, CPU)
    tokens, positions, slots, rows, starts = [], [], [], [], [0]
    for span, count in zip(spans, logits, strict=True):
        fed = span.seq.tokens[span.start : span.stop]
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
    assert batch.context_lens.tolist() == [s.stop for s in spans]
    assert batch.max_query_len == max(b - a for a, b in pairwise(starts))
    for span, row in zip(spans, batch.block_tables.tolist(), strict=True):
        table = span.seq.block_table
        assert row == table + [0] * (batch.block_tables.shape[1] - len(table))


def one(span: Span, count: int) -> ForwardBatch:
    return make_batch([span], [count], 4, CPU)


@pytest.fixture
def seq() -> Sequence:
    return Sequence(0, [10, 11, 12, 13, 14, 15], 3, 20, block_table=[3, 1, 2])


def test_a_chunk_of_a_prompt_needs_no_logits(seq: Sequence) -> None:
    batch = one(Span(seq, 1, 5), 0)
    assert batch.token_ids.tolist() == [11, 12, 13, 14]
    assert batch.slots.tolist() == [13, 14, 15, 4]
    assert batch.logit_rows.tolist() == []


def loaded(seq: Sequence) -> BatchState:
    """A state of two slots, of which the second is idle."""
    state = BatchState(2, 3, CPU)
    state.load([seq], 0)
    return state


def fed(
    seq: Sequence,
    tokens: list[int],
    length: int | None,
    offset: int,
    margin: int,
    cached: int = 0,
    max_len: int = 20,
    last_only: bool = False,
) -> tuple[ForwardBatch, LiveRows]:
    ids = torch.tensor([tokens, tokens])
    lens = None if length is None else torch.tensor([length, length])
    held = torch.tensor([cached, cached])
    what = Rectangle(ids, lens, offset, margin, max_len, last_only, held)
    return live_batch(what, loaded(seq), 4, 95)


def test_scoring_feeds_the_last_token_and_the_proposals(seq: Sequence) -> None:
    """Three of four proposals are live; ids past the vocabulary become the model's last id."""
    batch, live = fed(seq, [15, 90, 91, 99, 93], 3, -1, 1)
    assert batch.token_ids.tolist() == [15, 90, 91, 94]
    assert batch.positions.tolist() == [5, 6, 7, 8]
    assert batch.slots.tolist() == [5, 6, 7, 8]
    assert batch.context_lens.tolist() == [9, 0] and batch.query_start.tolist() == [0, 4, 4]
    assert batch.logit_rows is None, "all rows are wanted"
    assert live.logits.tolist() == live.tokens.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("cached", "want"), [(4, [14, 15]), (5, [15]), (6, [])])
def test_a_draft_is_not_fed_what_its_cache_holds(
    seq: Sequence, cached: int, want: list[int]
) -> None:
    batch, live = fed(seq, [14, 15], 2, -2, 2, cached, last_only=True)
    assert batch.token_ids.tolist() == want
    assert live.logits.tolist() == ([0] if want else [])
    assert batch.logit_rows is None or batch.logit_rows.tolist() == [1]


def test_a_draft_step_feeds_the_token_just_drawn(seq: Sequence) -> None:
    batch, _ = fed(seq, [90], 2, 0, 2, last_only=True)
    assert batch.token_ids.tolist() == [90]
    assert batch.positions.tolist() == [6]
    assert batch.context_lens.tolist() == [7, 0]
    assert len(fed(seq, [90], 1, 0, 2, last_only=True)[0].token_ids) == 0, "one token was wanted"
    assert len(fed(seq, [14, 15], 0, -2, 2, last_only=True)[0].token_ids) == 0, "none was"


@pytest.mark.parametrize(("max_len", "count"), [(20, 5), (8, 3)])
@pytest.mark.parametrize("last_only", [False, True])
def test_a_block_is_fed_whatever_is_proposed(
    seq: Sequence, max_len: int, count: int, last_only: bool
) -> None:
    batch, live = fed(seq, [15, 90, 91, 92, 93], None, -1, 0, 0, max_len, last_only)
    assert batch.token_ids.tolist() == [15, 90, 91, 92, 93][:count]
    assert batch.positions.tolist() == [5, 6, 7, 8, 9][:count]
    assert batch.context_lens.tolist() == [5 + count, 0]
    assert live.tokens.tolist() == list(range(count))
    assert live.logits.tolist() == ([0] if last_only else list(range(count)))


@pytest.mark.parametrize("tail", [1, 2, 5])
def test_a_state_holds_the_last_tokens(seq: Sequence, tail: int) -> None:
    state = BatchState(3, 3, CPU, tail=tail)
    state.load([seq, Sequence(1, [7, 8], 2, 9, block_table=[4])], 0)
    want = [[0] * 5 + row for row in (seq.tokens, [7, 8], [0])]
    assert state.tail.tolist() == [row[-tail:] for row in want]
    assert state.length.tolist() == [6, 2, 1] and state.limit.tolist() == [20, 9, 0]


def test_dtypes_are_what_the_kernels_take(seq: Sequence) -> None:
    batch = one(Span(seq, 0, 6), 1)
    for name in ("token_ids", "positions", "slots", "logit_rows"):
        assert getattr(batch, name).dtype == torch.int64, name
    for name in ("query_start", "context_lens", "block_tables"):
        assert getattr(batch, name).dtype == torch.int32, name


def test_rows_of_a_rectangle() -> None:
    starts, last = rectangle(3, 4, 1, CPU)
    assert last is not None
    assert starts.tolist() == [0, 4, 8, 12] and last.tolist() == [3, 7, 11]
    _, some = rectangle(2, 4, 3, CPU)
    assert some is not None and some.tolist() == [1, 2, 3, 5, 6, 7]
    assert rectangle(2, 4, 4, CPU)[1] is None


def test_logits_of_a_slot_s_last_tokens(seq: Sequence) -> None:
    """Two of three proposals are wanted, after two tokens that the cache lacks."""
    ids, both = torch.tensor([[14, 15, 90, 91]] * 2), torch.tensor([2, 2])
    what = Rectangle(ids, both, -2, 2, 20, False, None, first_logit=1)
    batch, live = live_batch(what, loaded(seq), 4, 95)
    assert batch.token_ids.tolist() == [14, 15, 90]
    assert batch.logit_rows is not None and batch.logit_rows.tolist() == [1, 2]
    assert live.logits.tolist() == [0, 1] and live.tokens.tolist() == [0, 1, 2]
    padded = padded_batch(what, loaded(seq), 4, 95).logit_rows
    assert padded is not None and padded.tolist() == [1, 2, 3, 5, 6, 7]
