"""Repetition penalty, suppressed tokens, no end too early: transformers' texts and distributions.

transformers' own processors and `generate` are the judges.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.generation import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specdec_cli.acceptance.block import Block
from specdec_cli.core.candidates import Verdict
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.logits_processors import LogitsProcessors, TextsBefore
from specdec_cli.core.state import BatchState, Texts
from specdec_cli.core.types import Request, SamplingParams, Sequence
from specdec_cli.methods.teacher import Teacher
from tests import lossless
from tests.support import (
    VOCAB,
    decode,
    greedy_reference,
    make_engine,
    ngram_engine,
    reference,
    save_noised,
    save_tiny,
)

CPU = torch.device("cpu")
SIGNIFICANT = 1e-4
ALL = {"repetition_penalty": 1.3, "suppress_tokens": (7, 11, 50), "min_new_tokens": 6}
SETTINGS: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.6},
    "suppress": {"suppress_tokens": (3, 8, 21, 40)},
    "minimum": {"min_new_tokens": 9},
    "all": ALL,
}
PROMPTS = [[5, 9, 5, 9, 5], [12], [33, 20, 7, 7, 4, 18, 33, 20, 7]]
NEW = 20


def judge(texts: torch.Tensor, logits: torch.Tensor, num_prompt: int, eos: list[int]) -> Any:
    """Rows [N, V] that follow `texts` [N, L], by transformers' processors of `ALL`."""
    found = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            MinNewTokensLengthLogitsProcessor(num_prompt, 6, eos),
            SuppressTokensLogitsProcessor(ALL["suppress_tokens"]),
        ]
    )
    return found(texts, logits.clone())


@pytest.mark.parametrize("num_new", [0, 3, 5, 6])
def test_rows_are_those_of_transformers(num_new: int) -> None:
    """Each row follows the proposals before it; a draft may have fewer ids."""
    generator = torch.Generator().manual_seed(num_new)
    text = torch.randint(0, VOCAB, (8 + num_new,), generator=generator)
    proposals = torch.randint(0, VOCAB, (1, 3), generator=generator)
    logits = torch.randn(1, 4, VOCAB, generator=generator) * 4
    how = LogitsProcessors.of(SamplingParams(**ALL), [2, 30, 10**6], VOCAB, CPU)
    assert how is not None
    before = how.of_text(text.tolist(), 8)
    each, at_once = before.after_each(logits, proposals), before.after_all(logits, proposals)
    narrow = before.after_each(logits[..., :40], proposals)
    for row in range(4):
        longer = torch.cat((text, proposals[0, :row]))[None]
        want = judge(longer, logits[:, row], 8, [2, 30])
        assert torch.equal(each[:, row], want)
        assert torch.equal(narrow[:, row], want[:, :40])
    # Places drawn at once follow all that was drawn before them, and each is one token later.
    whole = torch.cat((text, proposals[0]))[None]
    assert torch.equal(at_once[:, 0], judge(whole, logits[:, 0], 8, [2, 30]))
    assert at_once[0, :, 2].isinf().tolist() == [num_new + 3 + i < 6 for i in range(4)]


def test_nothing_is_made_without_parameters_that_need_it() -> None:
    plain = SamplingParams(temperature=0.7, top_k=5, max_new_tokens=9)
    assert LogitsProcessors.of(plain, [1], VOCAB, CPU) is None


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = save_tiny(folder / "target", "llama", seed=4)
    return target, save_noised(folder / "draft", target)


@pytest.fixture(scope="module")
def wanted(pair: tuple[Path, Path]) -> Callable[[dict[str, Any], int | None], list[list[int]]]:
    """Texts of transformers' greedy `generate`; min_new_tokens needs an end of text."""
    model = reference(pair[0])

    def texts(settings: dict[str, Any], eos: int | None) -> list[list[int]]:
        settings = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
        found = []
        for prompt in PROMPTS:
            found.append(greedy_reference(model, prompt, NEW, eos, **settings))
        return found

    return texts


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_texts_are_those_of_generate(
    name: str, pair: tuple[Path, Path], wanted: Callable[..., list[list[int]]]
) -> None:
    settings = SETTINGS[name]
    plain = wanted({}, None)
    # An end that comes early without a minimum.
    eos = plain[0][2] if "min_new_tokens" in settings else None
    want = wanted(settings, eos)
    assert want != plain
    ends = frozenset() if eos is None else frozenset({eos})
    target, draft = pair
    shape: dict[str, Any] = {"batch_size": 2, "eos_ids": ends}
    engines = {
        "draft": make_engine(target, draft, **shape),
        "ahead": make_engine(target, draft, runs_ahead=True, **shape),
        "itself": make_engine(target, target, **shape),
        "ngram": ngram_engine(target, **shape),
    }
    for how, engine in engines.items():
        for k in (0, 3) if how == "draft" else (4,):
            seqs = decode(engine, PROMPTS, k, max_new_tokens=NEW, **settings)
            assert [s.output_ids for s in seqs] == want, (how, k)
            if how == "itself":  # a draft's logits are changed as the target's are
                assert all(s.accepted_per_round == s.proposed_per_round for s in seqs)


def test_runs_of_one_engine_do_not_share_what_they_have_seen(pair: tuple[Path, Path]) -> None:
    """Later sequences and later runs use the rows of texts again, also after a preemption."""
    target, draft = pair
    prompts = [[*p, i + 3] for i in range(3) for p in PROMPTS]
    fresh = [
        decode(make_engine(target, draft), [p], 3, max_new_tokens=NEW, **ALL)[0].output_ids
        for p in prompts
    ]
    engine = make_engine(target, draft, batch_size=3, num_blocks=18, runs_ahead=True)
    for settings in ({}, ALL, ALL):
        seqs = decode(engine, prompts, 3, max_new_tokens=NEW, **settings)
        assert ([s.output_ids for s in seqs] == fresh) is bool(settings)
    assert any(s.num_preemptions for s in seqs)


PARAMS = SamplingParams(
    **{"temperature": 0.9, "top_k": 6, "max_new_tokens": 4, "seed": 2},
    **{"repetition_penalty": 2.5, "suppress_tokens": (2,)},
)
PROMPT = [3, 1, 3]


def p_value(tiny: tuple[Path, Path], k: int, *, kind: str = "draft", rule: Any = None) -> float:
    sizes = {"batch_size": 1000, "num_blocks": 4500, "rule": rule}
    engine = ngram_engine(tiny[0], **sizes)
    if kind == "draft":
        engine = make_engine(*tiny, **sizes)
    prompt = PROMPT if kind == "draft" else [3, 1, 4, 1, 3, 1, 4]
    found = lossless.engine_trial(engine, tiny[0], prompt, k, PARAMS, 4000)
    return lossless.adjusted(found)


@pytest.mark.parametrize(
    ("kind", "k", "rule"),
    [
        pytest.param("draft", 0, None, marks=pytest.mark.slow),
        ("draft", 3, None),
        ("draft", 2, Block()),
        pytest.param("ngram", 3, None, marks=pytest.mark.slow),
    ],
)
def test_samples_follow_transformers(tiny: tuple[Path, Path], kind: str, k: int, rule: Any) -> None:
    assert p_value(tiny, k, kind=kind, rule=rule) > SIGNIFICANT


def proposals_unseen(self: TextsBefore, logits: torch.Tensor, tokens: torch.Tensor) -> Any:
    return self.after_all(logits, tokens[:, :0])


def proposals_all_seen(self: TextsBefore, logits: torch.Tensor, tokens: torch.Tensor) -> Any:
    return self.after_all(logits, tokens)


def rounds_unseen(self: LogitsProcessors, state: BatchState, verdict: Verdict) -> None:
    """Tokens of earlier rounds have no penalty."""


def last_unseen(self: LogitsProcessors, state: BatchState, verdict: Verdict) -> None:
    """The token after the accepted proposals has no penalty."""
    real_take_in(self, state, Verdict(verdict.token_ids, verdict.num_accepted - 1))


real_take_in = LogitsProcessors.take_in
FAULTS = [
    (TextsBefore, "after_each", proposals_unseen),
    (TextsBefore, "after_each", proposals_all_seen),
    (LogitsProcessors, "take_in", rounds_unseen),
    (LogitsProcessors, "take_in", last_unseen),
]


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=[pytest.mark.slow] * (n % 2 > 0)) for n, f in enumerate(FAULTS)],
    ids=lambda fault: fault[2].__name__,
)
def test_fault_is_caught(
    tiny: tuple[Path, Path], fault: tuple[type, str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*fault)
    assert p_value(tiny, 2) < SIGNIFICANT


def test_a_draft_that_is_drawn_otherwise_than_recorded_is_caught(
    tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Drafting.draw_all

    def draw_all(self: Drafting, logits: torch.Tensor, ids: Any = None) -> torch.Tensor:
        tokens = real(self, logits, ids)
        self._logits[-1] = logits  # without the penalty that tokens were drawn with
        return tokens

    monkeypatch.setattr(Drafting, "draw_all", draw_all)
    assert p_value(tiny, 2) < SIGNIFICANT


@pytest.mark.parametrize("kind", ["draft", "ngram"])
def test_forecast_is_what_rounds_do(pair: tuple[Path, Path], kind: str) -> None:
    """Greedy chances are 0 or 1: those of the first proposals of rounds that were run."""
    engine = make_engine(*pair) if kind == "draft" else ngram_engine(pair[0])
    params = SamplingParams(max_new_tokens=NEW, **ALL)
    seq = engine.run([Request(0, tuple(PROMPTS[2]))], 2, params).seqs[0]
    told = engine.forecast(Request(0, tuple(PROMPTS[2])), seq.output_ids, 2, params)
    assert replayed(told, seq) == seq.accepted_per_round
    changed = engine.forecast(
        Request(0, tuple(PROMPTS[2])), seq.output_ids, 2, SamplingParams(max_new_tokens=NEW)
    )
    assert kind == "ngram" or replayed(changed, seq) != seq.accepted_per_round


def replayed(told: Any, seq: Sequence) -> list[int]:
    """Accepted proposals of the rounds of 2 along a text, by its forecast."""
    found, at, count = [], 0, len(seq.output_ids)
    while at < count:
        room = min(2, count - at - 1)
        if told.chains:
            proposed, accepted = (min(room, n) for n in told.chains[at])
        else:
            hits = [*told.accept[at : at + room], 0.0]
            proposed, accepted = room, hits.index(0.0)
        found += [accepted] if proposed else []
        at += accepted + 1
    return found


def test_logits_after_a_text_are_changed_too(pair: tuple[Path, Path]) -> None:
    engine = make_engine(*pair, eos_ids=frozenset({9}))
    tokens, params = [*PROMPTS[0], 4, 31], SamplingParams(**ALL)
    plain = engine.logits_after(tokens, 1, 5, SamplingParams())
    found = engine.logits_after(tokens, 3, 5, params)
    want = judge(torch.tensor([tokens]), plain[None], 5, [9])[0]
    torch.testing.assert_close(found, want)
    assert found[9].isinf()


@pytest.mark.parametrize("settings", list(SETTINGS.values()), ids=list(SETTINGS))
def test_the_host_reads_nothing(settings: dict[str, Any]) -> None:
    """Fake tensors have no values: an operation that reads one on the host raises."""
    with FakeTensorMode():
        how = LogitsProcessors.of(SamplingParams(**settings), [2], VOCAB, CPU)
        texts = Texts.empty(4, 30, CPU)
        texts.seen = torch.zeros(4, VOCAB + 1, dtype=torch.bool)
        state = BatchState(3, 4, CPU, texts)
        assert how is not None
        before = how.at(state)
        tokens = torch.zeros(3, 2, dtype=torch.int64)
        assert before.after_each(torch.zeros(3, 3, VOCAB), tokens).shape == (3, 3, VOCAB)
        assert before.after_all(torch.zeros(3, 1, 40), tokens).shape == (3, 1, 40)
        how.take_in(state, Verdict(torch.zeros(3, 3, dtype=torch.int64), torch.zeros(3).long()))


def test_each_row_of_a_written_text_follows_the_token_that_it_read() -> None:
    """Row i of a teacher's pass read the token at `start + i`, so its logits know that one too."""
    params = SamplingParams(max_new_tokens=4, repetition_penalty=2.0)
    processors = LogitsProcessors.of(params, [], 8, torch.device("cpu"))
    teacher = SimpleNamespace(processors=processors, target=SimpleNamespace(vocab_size=8))
    seq = SimpleNamespace(tokens=[5, 1, 6, 2, 3], num_prompt_tokens=2)
    logits = torch.arange(1.0, 25.0).view(3, 8)
    found = Teacher.changed(teacher, logits, seq, 1)  # type: ignore[arg-type]
    for row, known in enumerate(([5, 1], [5, 1, 6], [5, 1, 6, 2])):
        expected = logits[row].clone()
        expected[known] /= 2.0
        assert torch.equal(found[row], expected)
