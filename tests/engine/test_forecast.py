"""Forecasts of proposers that nobody wrote a forecast for, against rounds that were really run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specdec_cli.acceptance.base import NoForecast
from specdec_cli.core.batch import Rectangle
from specdec_cli.core.candidates import Candidates
from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.engine.loop import Engine
from specdec_cli.methods.base import Proposer
from specdec_cli.methods.draft_model import DraftModel
from specdec_cli.methods.forecast import forecast
from specdec_cli.plugged import PluggedMethod
from tests.engine.fakes import BLOCK, Cells, fake_engine, random_prompt, sometimes
from tests.rounds import LARGEST, same_rounds, text_of
from tests.support import VOCAB, decode, make_engine, reference, save_tiny

PROMPTS = [random_prompt(9), random_prompt(1), random_prompt(14)]


class OwnText:
    """Keeps each text by its prompt's index, and draws from what `sometimes` says of all of it."""

    def __init__(self, parts: Any) -> None:
        self.known: dict[int, list[int]] = {}

    def prefill(self, spans: Any, features: Any) -> None:
        for seq, start, stop in spans:
            before = self.known.get(seq.index, [])[:start]
            assert len(before) == start, "a text begins at its beginning"
            self.known[seq.index] = before + seq.tokens[start:stop]

    def texts(self, state: Any) -> list[list[int]]:
        slots = zip(*(t.tolist() for t in (state.index, state.length, state.tail)), strict=True)
        return [[*self.known.get(index, [])[: n - 1], tail[-1]] for index, n, tail in slots]

    def propose(self, state: Any, draft: Any) -> Candidates:
        texts = self.texts(state)
        while not draft.is_over:
            logits = torch.zeros(len(texts), VOCAB)
            for row, text in zip(logits, texts, strict=True):
                row[sometimes(text)] = 1.0
            for text, token in zip(texts, draft.draw(logits).tolist(), strict=True):
                text.append(token)
        return cast(Candidates, draft.candidates())

    def commit(self, state: Any, verdict: Any, target: Any) -> None:
        rows = zip(verdict.token_ids.tolist(), verdict.num_accepted.tolist(), strict=True)
        for index, text, (tokens, count) in zip(
            state.index.tolist(), self.texts(state), rows, strict=True
        ):
            self.known[index] = text + tokens[:count]


class OwnCache(OwnText):
    """The same, with its texts in cache blocks of its own."""

    is_paged = True

    def __init__(self, parts: Any) -> None:
        self.cells = Cells(BLOCK)

    def prefill(self, spans: Any, features: Any) -> None:
        for seq, start, stop in spans:
            assert self.cells.read(seq.block_table, start) == seq.tokens[:start]
            self.cells.write(seq.block_table, start, seq.tokens[start:stop])

    def texts(self, state: Any) -> list[list[int]]:
        slots = zip(*(t.tolist() for t in (state.block_tables, state.length)), strict=True)
        before = [self.cells.read(table, n - 1) for table, n in slots]
        return [a + b for a, b in zip(before, state.tail[:, -1:].tolist(), strict=True)]

    def propose(self, state: Any, draft: Any) -> Candidates:
        """Leave wrong tokens behind, which the next round has to write over."""
        found = super().propose(state, draft)
        for b, n in enumerate(state.length.tolist()):
            if state.active[b] and found.lens[b]:
                wrong = [0] * (int(found.lens[b]) + 1)
                self.cells.write(state.block_tables[b].tolist(), n - 1, wrong)
        return found

    def commit(self, state: Any, verdict: Any, target: Any) -> None:
        for b, n in enumerate(state.length.tolist()):
            if state.active[b]:
                tokens = [*state.tail[b, -1:].tolist(), *verdict.token_ids[b].tolist()]
                count = int(verdict.num_accepted[b]) + 1
                self.cells.write(state.block_tables[b].tolist(), n - 1, tokens[:count])


def plugged(engine: Engine, made: type[Any]) -> Engine:
    parts: Any = SimpleNamespace(target=engine.target)
    engine.proposer = cast(Proposer, PluggedMethod("mine", made, parts))
    return engine


@pytest.mark.parametrize("made", [OwnText, OwnCache])
@pytest.mark.parametrize(
    "options", [{}, {"prefill_chunk": 3}, {"num_blocks": 12}], ids=["plain", "chunks", "tight"]
)
def test_rounds_of_a_plugin_with_state_are_predicted(made: type[Any], options: Any) -> None:
    """The rounds of the largest k suffice, whatever room rounds have side by side."""
    engine = plugged(fake_engine(**options), made)
    seqs = decode(engine, PROMPTS, LARGEST, max_new_tokens=24)
    texts = [text_of(engine, seq, SamplingParams(max_new_tokens=24)) for seq in seqs]
    assert {a for s in seqs for a in s.accepted_per_round} >= {0, 2, 3}
    # What a method keeps by `commit` outside blocks might differ from what `prefill` makes.
    assert {text.is_rough for text in texts} == {True if made is OwnText else None}
    for k in range(1, LARGEST + 1):
        same_rounds(decode(engine, PROMPTS, k, max_new_tokens=24), texts, k)


class SomeLayers:
    """Drafts with two of the target's three layers, over the target's cache."""

    def __init__(self, parts: Any) -> None:
        self.target = parts.target

    def propose(self, state: Any, draft: Any) -> Candidates:
        fed, offset = state.tail[:, -1:], -1
        while not draft.is_over:
            what = Rectangle(fed, draft.lens, offset, 2, 999, last_only=True)
            token = draft.draw(self.target.forward_slots(what, state, only=(0, 2)).logits[:, 0])
            fed, offset = token[:, None], offset + 1
        return cast(Candidates, draft.candidates())


class SomeLayersPaged(SomeLayers):
    is_paged = True


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    return save_tiny(folder, "llama", num_hidden_layers=3, initializer_range=0.06)


@pytest.mark.parametrize("made", [SomeLayers, SomeLayersPaged])
def test_rounds_that_run_the_target_are_predicted(made: type[Any], three_layers: Path) -> None:
    """The target's cache of the text is there in each of the rounds side by side."""
    engine = plugged(make_engine(three_layers, None, num_blocks=90, batch_size=2), made)
    plain = decode(make_engine(three_layers, None), PROMPTS, 0, max_new_tokens=24)
    seqs = decode(engine, PROMPTS, LARGEST, max_new_tokens=24)
    assert [s.tokens for s in seqs] == [s.tokens for s in plain]
    accepted = {a for s in seqs for a in s.accepted_per_round}
    assert 0 in accepted and max(accepted) >= 2
    texts = [text_of(engine, seq, SamplingParams(max_new_tokens=24)) for seq in seqs]
    assert {text.is_rough for text in texts} == {None}
    for k in range(1, LARGEST + 1):
        same_rounds(decode(engine, PROMPTS, k, max_new_tokens=24), texts, k)


def test_chances_of_rounds_that_run_the_target_do_not_depend_on_how_many_run_at_once(
    three_layers: Path,
) -> None:
    params = SamplingParams(temperature=1.2, max_new_tokens=40)
    engine = plugged(make_engine(three_layers, None), SomeLayers)
    seqs = decode(engine, [PROMPTS[0]], 3, temperature=1.2, max_new_tokens=40)
    found = []
    for made, num_blocks in ((SomeLayers, 200), (SomeLayersPaged, 200), (SomeLayers, 20)):
        engine = plugged(make_engine(three_layers, None, num_blocks=num_blocks), made)
        request = Request(0, tuple(PROMPTS[0]))
        found.append(engine.forecast(request, seqs[0].output_ids, LARGEST, params))
    for ahead in zip(*(one.ahead or () for one in found), strict=True):
        for other in ahead[1:]:
            assert other == pytest.approx(ahead[0], abs=1e-4)


class OneToken(DraftModel):
    """Changes the rounds of a method that has a forecast."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts.draft, 999)

    def propose(self, state: Any, draft: Any) -> Candidates:
        draft.end_after(torch.ones(len(draft.caps), draft.k, dtype=torch.bool))
        return super().propose(state, draft)


class SameRounds(DraftModel):
    """Leaves them as they are."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts.draft, 999)


@pytest.mark.parametrize("made", [OneToken, SameRounds])
def test_an_inherited_forecast_is_not_of_changed_rounds(
    made: type[Any], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    whole = DraftModel.forecast
    monkeypatch.setattr(DraftModel, "forecast", lambda *a: asked.append(1) or whole(*a))
    engine = make_engine(target, target)
    parts: Any = SimpleNamespace(target=engine.target, draft=cast(Any, engine.proposer).model)
    engine.proposer = cast(Proposer, PluggedMethod("mine", made, parts))
    seqs = decode(engine, PROMPTS, LARGEST, max_new_tokens=12)
    texts = [text_of(engine, seq, SamplingParams(max_new_tokens=12)) for seq in seqs]
    assert bool(asked) == (made is SameRounds)
    for k in (1, 3, LARGEST):
        same_rounds(decode(engine, PROMPTS, k, max_new_tokens=12), texts, k)


class Table:
    """Draws a block from a table by the last token. The table also says where a block ends."""

    depends_on_k = True
    draws_itself = False

    def __init__(self, parts: Any) -> None:
        made = torch.Generator().manual_seed(0)
        self.logits = 2 * torch.randn(VOCAB, LARGEST, VOCAB, generator=made)
        self.ends = torch.rand(VOCAB, LARGEST, generator=made) < 0.2

    def propose(self, state: Any, draft: Any) -> Candidates:
        last = state.tail[:, -1]
        draft.end_before(self.ends[last, : draft.k])
        draft.draw_all(self.logits[last, : draft.k])
        found = draft.candidates()
        if not self.draws_itself:
            return cast(Candidates, found)
        return Candidates(self.logits[last, : draft.k].argmax(-1), found.lens)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"), "llama", initializer_range=0.3)


def test_chances_of_blocks_are_those_of_transformers_model(target: Path) -> None:
    """Each place's, up to the end of its block; a longer text than fits side by side."""
    engine = plugged(make_engine(target, None, num_blocks=60), Table)
    (seq,) = decode(engine, [PROMPTS[0]], 3, max_new_tokens=90, temperature=0.8)
    params = SamplingParams(temperature=0.8, max_new_tokens=90)
    found = engine.forecast(Request(0, tuple(PROMPTS[0])), seq.output_ids, LARGEST, params)
    assert engine.allocator.num_used == 0
    assert found.ahead is not None and found.overlap is not None and found.only_k == LARGEST
    table = Table(None)
    with torch.no_grad():
        p = (reference(target)(torch.tensor([seq.tokens])).logits[0] / 0.8).softmax(-1)
    q = (table.logits / 0.8).softmax(-1)
    for i, n in enumerate(range(len(PROMPTS[0]), len(seq.tokens))):
        last = seq.tokens[n - 1]
        count = min([LARGEST, *table.ends[last].nonzero().flatten().tolist()])
        written = seq.tokens[n : n + count]
        ratios = (q[last, j, token] / p[n - 1 + j, token] for j, token in enumerate(written))
        wanted = [min(1.0, float(ratio)) for ratio in ratios]
        assert found.ahead[i] == pytest.approx(wanted, abs=1e-4)
        overlap = float(torch.minimum(p[n - 1], q[last, 0]).sum()) if count else 0.0
        assert found.overlap[i] == pytest.approx(overlap, abs=1e-4)


def test_proposals_that_were_drawn_otherwise_have_no_forecast(target: Path) -> None:
    class Own(Table):
        draws_itself = True

    engine = plugged(make_engine(target, None), Own)
    with pytest.raises(NoForecast):
        engine.forecast(Request(0, (5, 6)), [7, 8, 9, 3], 3, SamplingParams(temperature=0.8))
    assert engine.allocator.num_used == 0


def test_a_proposer_that_says_nothing_more_is_predicted() -> None:
    """Certain proposals are counted, also past the end of the text."""

    class Twos(Proposer):
        def propose(self, state: Any, draft: Any) -> Candidates:
            return Candidates(torch.full((len(draft.caps), draft.k), 2), draft.caps.clamp(max=2))

    engine = fake_engine()
    found = forecast(
        Twos(), engine._teacher(SamplingParams()), [4, 4], [2, 2, 7, 2], 3, SamplingParams()
    )
    assert found.chains == ((2, 2), (2, 1), (2, 0), (2, 1)) and found.ahead is None
    assert found.only_k is None
