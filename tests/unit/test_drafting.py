"""Drawing a block at once, and ends of it, against drawing token by token and plain Python."""

import pytest
import torch

from specdec_cli.core.drafting import Drafting
from specdec_cli.core.types import SamplingParams

B, K, V = 5, 4, 11
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9)


def made(params: SamplingParams, caps: list[int] | None = None, vocab: int = V) -> Drafting:
    noise = torch.rand(B, K + 1, generator=torch.Generator().manual_seed(2))[:, :K]
    limits = torch.tensor(caps or [K] * B)
    return Drafting(K, params, limits, vocab, None if params.is_greedy else noise)


def block(width: int = V) -> torch.Tensor:
    return torch.randn(B, K, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("ids", [None, [9, 2, 4, 0, 10, 7, 1]], ids=["own", "reduced"])
@pytest.mark.parametrize("at_once", [(4,), (1, 3), (2, 1, 1)])
def test_a_block_is_what_single_draws_give(
    params: SamplingParams, ids: list[int] | None, at_once: tuple[int, ...]
) -> None:
    logits = block(V if ids is None else len(ids))
    logits[3, 2] = float("nan")
    of = None if ids is None else torch.tensor(ids)
    singly, whole = made(params), made(params)
    for place in range(K):
        singly.draw(logits[:, place], of)
    tokens = torch.cat([whole.draw_all(part, of) for part in logits.split(at_once, dim=1)], dim=1)
    found, want = whole.candidates(), singly.candidates()
    assert whole.is_over and torch.equal(tokens, found.token_ids)
    assert torch.equal(found.token_ids, want.token_ids) and found.token_ids[3, 2] == -1
    assert found.token_ids.is_contiguous() and found.lens.tolist() == [K] * B
    assert (found.q is None) == params.is_greedy
    if found.q is not None and want.q is not None:
        torch.testing.assert_close(found.q.logits, want.q.logits, rtol=0, atol=0, equal_nan=True)


def test_ids_past_the_targets_are_cut_off() -> None:
    found = made(SAMPLED, vocab=3)
    assert int(found.draw_all(block()).max()) < 3
    q = found.candidates().q
    assert q is not None and q.logits.shape == (B, K, 3)


@pytest.mark.parametrize("kept", [0, 1], ids=["before", "after"])
def test_the_first_mark_ends_a_block(kept: int) -> None:
    """Nothing is prolonged: neither beyond the caps nor beyond an earlier end."""
    marks = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1]])
    caps = [4, 3, 2, 4, 4]
    draft = made(SamplingParams(), caps)
    draft.draw_all(block())
    end = draft.end_after if kept else draft.end_before
    end(marks.bool())
    want = [
        min([cap, *(place + kept for place, mark in enumerate(row) if mark)])
        for row, cap in zip(marks.tolist(), caps, strict=True)
    ]
    assert draft.candidates().lens.tolist() == want
    end(torch.zeros(B, K, dtype=torch.bool))
    draft.end_after(torch.ones(B, K, dtype=torch.bool))
    assert draft.candidates().lens.tolist() == [min(1, n) for n in want]


def test_an_end_before_the_draws_saves_passes() -> None:
    draft = made(SamplingParams())
    draft.end_before(torch.arange(K).expand(B, K) == 2)
    steps = 0
    while not draft.is_over:
        draft.draw(block()[:, steps])
        steps += 1
    found = draft.candidates()
    assert steps == 2 and found.token_ids.shape == (B, K) and found.lens.tolist() == [2] * B


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drawn", [0, 1, 3, 4])
def test_places_that_were_not_drawn_are_no_proposals(drawn: int, params: SamplingParams) -> None:
    caps = [4, 2, 0, 1, 4]
    draft = made(params, caps)
    for place in range(drawn):
        draft.draw(block()[:, place])
    found = draft.candidates()
    assert found.lens.tolist() == [min(cap, drawn) for cap in caps]
    assert found.token_ids.shape == (B, K)


@pytest.mark.parametrize("at_once", [(4,), (1, 1, 1, 1), (1, 3)])
def test_a_policy_stops_a_block_after_its_token(at_once: tuple[int, ...]) -> None:
    caps = [4, 4, 1, 0, 4]
    draft = made(SamplingParams(), caps)
    draft.stop = lambda columns, logits: (logits.argmax(dim=1) == columns) & (columns % 3 == 0)
    logits = block()
    for part in logits.split(at_once, dim=1):
        draft.draw_all(part)
    found = draft.candidates()
    for row, length, cap in zip(found.token_ids.tolist(), found.lens.tolist(), caps, strict=True):
        assert length == min([cap, *(i + 1 for i, token in enumerate(row) if token % 3 == 0)])
    assert len(set(found.lens.tolist())) > 2
