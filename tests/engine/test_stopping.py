"""Ends of a sequence: EOS at every place of a draft, stop strings across every boundary, length.

The target follows a script, so the place of each event in a round is known.
"""

from collections.abc import Sequence as Values
from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specdec_cli.core.detokenize import Decoder, StopFinder, cut_at_stop
from specdec_cli.core.types import Emission, Request, SamplingParams, Sequence
from tests.engine.fakes import Rule, fake_engine

EOS = 2
FILLER = 90  # the target writes this token after its script
PROMPT = [10, 11, 12]


def script(tokens: Values[int], prompt: Values[int] = PROMPT) -> Rule:
    """A rule that writes `tokens` after `prompt`, independent of the text so far."""

    def rule(prefix: list[int]) -> int:
        place = len(prefix) - len(prompt)
        return tokens[place] if place < len(tokens) else FILLER

    return rule


def wrong_from(rule: Rule, place: int, prompt: Values[int] = PROMPT) -> Rule:
    """A draft that is right before this place of the output and wrong from there on."""

    def draft(prefix: list[int]) -> int:
        token = rule(prefix)
        return token if len(prefix) - len(prompt) < place else token + 1

    return draft


def run_one(
    target: Rule,
    draft: Rule,
    k: int,
    *,
    eos: frozenset[int] = frozenset({EOS}),
    finder: StopFinder | None = None,
    prompt: Values[int] = PROMPT,
    new_tokens: int = 30,
    ignore_eos: bool = False,
) -> tuple[Sequence, list[Emission]]:
    engine = fake_engine(draft, target, eos_ids=eos)
    emitted: list[Emission] = []
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=ignore_eos)
    request = Request(0, tuple(prompt), None if finder is None else lambda: finder)
    result = engine.run([request], k, params, emitted.extend)
    assert engine.allocator.num_used == 0
    (seq,) = result.seqs
    assert [t for e in emitted for t in e.token_ids] == seq.output_ids
    assert sum(e.num_accepted for e in emitted) == sum(seq.accepted_per_round)
    assert len(seq.accepted_per_round) == len(seq.proposed_per_round)
    return seq, emitted


K = 4
SPEECH = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30]


@pytest.mark.parametrize("place", range(K + 1))
@pytest.mark.parametrize("before", [0, K + 1], ids=["first-round", "second-round"])
def test_eos_accepted_or_as_bonus(place: int, before: int) -> None:
    """The draft proposes EOS itself; at place k EOS is the bonus token."""
    tokens = [*SPEECH[: before + place], EOS, 50, 51, 52, 53]
    target = script(tokens)
    seq, emitted = run_one(target, target, K)
    assert seq.output_ids == tokens[: before + place + 1]
    assert seq.finish_reason == "eos"
    accepted = K if place == K else place + 1
    assert seq.accepted_per_round == [K] * (before // (K + 1)) + [accepted]
    assert emitted[-1].num_accepted == accepted


@pytest.mark.parametrize("place", range(K))
@pytest.mark.parametrize("before", [0, K + 1], ids=["first-round", "second-round"])
def test_eos_as_the_residual_token(place: int, before: int) -> None:
    """The draft is right up to the EOS and proposes something else there."""
    tokens = [*SPEECH[: before + place], EOS, 50, 51, 52, 53]
    target = script(tokens)
    seq, emitted = run_one(target, wrong_from(target, before + place), K)
    assert seq.output_ids == tokens[: before + place + 1]
    assert seq.finish_reason == "eos"
    assert seq.accepted_per_round == [K] * (before // (K + 1)) + [place]
    assert emitted[-1].token_ids[-1] == EOS


def test_eos_that_the_target_rejects_does_not_end() -> None:
    """The draft proposes EOS at once; the target never writes it."""
    seq, _ = run_one(script(SPEECH), lambda prefix: EOS, K, new_tokens=11)
    assert seq.output_ids == SPEECH and seq.finish_reason == "length"
    assert set(seq.accepted_per_round) == {0}


@pytest.mark.parametrize("k", [0, 1, 3])
def test_eos_as_the_last_token_that_fits_is_eos(k: int) -> None:
    target = script([20, 21, EOS])
    seq, _ = run_one(target, target, k, new_tokens=3)
    assert seq.output_ids == [20, 21, EOS] and seq.finish_reason == "eos"


@pytest.mark.parametrize("k", [0, 2, 4])
def test_ignore_eos(k: int) -> None:
    target = script([20, EOS, 21, EOS, EOS])
    seq, _ = run_one(target, target, k, ignore_eos=True, new_tokens=8)
    assert seq.output_ids == [20, EOS, 21, EOS, EOS, FILLER, FILLER, FILLER]
    assert seq.finish_reason == "length"
    assert seq.accepted_per_round == seq.proposed_per_round


@pytest.mark.parametrize("k", [0, 1, 2, 5])
@pytest.mark.parametrize("ends", [7, 8, EOS])
def test_any_of_several_eos_ids(k: int, ends: int) -> None:
    target = script([20, 21, 22, ends, EOS, 7, 8])
    seq, _ = run_one(target, target, k, eos=frozenset({7, 8, EOS}))
    assert seq.output_ids == [20, 21, 22, ends] and seq.finish_reason == "eos"


def test_eos_in_the_prompt_does_not_end() -> None:
    prompt = [EOS, 10, EOS]
    target = script(SPEECH, prompt)
    seq, _ = run_one(target, target, K, prompt=prompt, new_tokens=6)
    assert seq.output_ids == SPEECH[:6]


def test_without_eos_ids_every_id_is_a_token() -> None:
    target = script([EOS, EOS])
    seq, _ = run_one(target, target, K, eos=frozenset(), new_tokens=4)
    assert len(seq.output_ids) == 4 and seq.finish_reason == "length"


def test_only_the_one_that_ended_leaves_the_batch() -> None:
    """After EOS in the middle of a batch the other sequences continue unchanged."""

    def target(prefix: list[int]) -> int:
        return EOS if prefix[0] == 41 and len(prefix) == 6 else 20 + len(prefix)

    engine = fake_engine(target, target, batch_size=3, eos_ids=frozenset({EOS}))
    requests = [Request(i, (40 + i, 10, 11)) for i in range(3)]
    seqs = engine.run(requests, 2, SamplingParams(max_new_tokens=10)).seqs
    assert [s.finish_reason for s in seqs] == ["length", "eos", "length"]
    assert seqs[1].output_ids == [23, 24, 25, EOS]
    for other in (seqs[0], seqs[2]):
        assert other.output_ids == [20 + n for n in range(3, 13)]


class Pieces:
    """Decoder over fixed pieces; an id without a piece is a dot."""

    def __init__(self, pieces: dict[int, str]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: Values[int]) -> str:
        return "".join(self.pieces.get(i, ".") for i in token_ids)


WORDS = Pieces({10: "S", 11: "ST", 20: "a", 21: "b", 22: "ST", 23: "OP", 24: "xSTOPy", 25: "STOP"})


def expected(
    decoder: Decoder, tokens: Values[int], stop: tuple[str, ...], eos: frozenset[int], most: int
) -> tuple[list[int], str]:
    """The expected output, found by searching the whole text after each token."""
    for count in range(1, most + 1):
        if any(s in decoder.decode(tokens[:count]) for s in stop):
            return list(tokens[:count]), "stop"
        if tokens[count - 1] in eos:
            return list(tokens[:count]), "eos"
    return list(tokens[:most]), "length"


STOPS: dict[str, tuple[list[int], list[int], tuple[str, ...]]] = {
    "inside-a-token": ([10], [20, 21, 24, 20], ("STOP",)),
    "whole-token": ([10], [20, 21, 25, 20], ("STOP",)),
    "across-tokens": ([10], [20, 22, 23, 20], ("STOP",)),
    "first-token": ([10], [25, 20], ("STOP",)),
    "begins-in-the-prompt": ([20, 11], [23, 20, 21, 20], ("STOP",)),
    "only-in-the-prompt": ([25], [20, 21, 20], ("STOP",)),
    "several": ([10], [20, 21, 21, 25], ("STOP", "bb", "zz")),
    "one-character": ([10], [20, 20, 20, 20, 20, 21, 20], ("b",)),
    "never": ([10], [20, 21], ("STOP",)),
}


@pytest.mark.parametrize("case", STOPS)
@pytest.mark.parametrize("k", [0, 1, 2, 3, 6])
def test_stop_string(case: str, k: int) -> None:
    """Right, wrong and sometimes right drafts put the rounds' boundaries at every place."""
    prompt, speech, stop = STOPS[case]
    tokens = speech + [FILLER] * 20
    target = script(tokens, prompt)
    want = expected(WORDS, tokens, stop, frozenset(), 12)
    for place in range(len(speech) + 2):
        draft = wrong_from(target, place, prompt)
        finder = StopFinder(WORDS, prompt, stop)
        seq, _ = run_one(target, draft, k, prompt=prompt, finder=finder, new_tokens=12)
        assert (seq.output_ids, seq.finish_reason) == want
        text = WORDS.decode(seq.output_ids)
        assert not any(s in cut_at_stop(text, stop) for s in stop)


@pytest.mark.parametrize("accepted", range(4))
def test_stop_across_an_accept_boundary(accepted: int) -> None:
    """Cases around "ST" as the last accepted proposal and "OP" as the target's own token."""
    tokens = [20, 21, 22, 23, 20, 20]
    target = script(tokens)
    finder = StopFinder(WORDS, PROMPT, ("STOP",))
    seq, emitted = run_one(target, wrong_from(target, accepted), 3, finder=finder)
    assert seq.output_ids == tokens[:4] and seq.finish_reason == "stop"
    assert emitted[0].num_accepted == accepted


def test_requests_run_again_begin_anew() -> None:
    """A finder remembers the end of a text, which the next run's first tokens would complete."""
    tokens = [23, 20, 20, 22]  # from "OP" to "ST"
    engine = fake_engine(script(tokens), script(tokens), eos_ids=frozenset())
    request = Request(0, tuple(PROMPT), partial(StopFinder, WORDS, PROMPT[:1], ("STOP",)))
    for _ in range(2):
        seq = engine.run([request], 2, SamplingParams(max_new_tokens=4)).seqs[0]
        assert seq.output_ids == tokens and seq.finish_reason == "length"


def test_accepted_tokens_past_a_stop_do_not_count() -> None:
    target = script([20, 25, 20, 21, 20])
    finder = StopFinder(WORDS, PROMPT, ("STOP",))
    seq, _ = run_one(target, target, 4, finder=finder)
    assert seq.output_ids == [20, 25]
    assert seq.proposed_per_round == [4] and seq.accepted_per_round == [2]


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [([20, 25, EOS], "stop"), ([20, EOS, 25], "eos"), ([22, 23], "stop")],
    ids=["stop-first", "eos-first", "stop-and-length-together"],
)
def test_the_first_end_counts(tokens: list[int], reason: str) -> None:
    target = script(tokens)
    for k in (0, 4):
        finder = StopFinder(WORDS, PROMPT, ("STOP",))
        seq, _ = run_one(target, target, k, finder=finder, new_tokens=len(tokens))
        assert seq.output_ids == tokens[:2] and seq.finish_reason == reason


@settings(max_examples=150, deadline=None)
@given(
    speech=st.lists(st.sampled_from([20, 21, 22, 23, EOS]), min_size=1, max_size=20),
    prompt=st.lists(st.sampled_from([20, 21, 11]), min_size=1, max_size=4),
    stop=st.lists(st.sampled_from(["ab", "STOP", "bST", "OPa", "aa", "PSTO"]), max_size=2),
    wrong=st.sets(st.integers(0, 30)),
    k=st.integers(0, 6),
    new_tokens=st.integers(1, 25),
)
def test_any_script_ends_where_it_should(
    speech: list[int], prompt: list[int], stop: list[str], wrong: set[int], k: int, new_tokens: int
) -> None:
    """EOS, stop strings and length come in any order; the draft is wrong at some places."""
    tokens = speech + [FILLER] * 25
    target = script(tokens, prompt)

    def draft(prefix: list[int]) -> int:
        return target(prefix) + (len(prefix) - len(prompt) in wrong)

    finder = StopFinder(WORDS, prompt, tuple(stop)) if stop else None
    seq, _ = run_one(target, draft, k, prompt=prompt, finder=finder, new_tokens=new_tokens)
    want = expected(WORDS, tokens, tuple(stop), frozenset({EOS}), new_tokens)
    assert (seq.output_ids, seq.finish_reason) == want
    rounds = len(seq.accepted_per_round) + seq.rounds_without_proposal
    # Each round adds a token from the target, except the last if a proposal ended it.
    assert sum(seq.accepted_per_round) + rounds - len(seq.output_ids) in (0, 1)


class Trained:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def decode(self, token_ids: Values[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids))
        return text


@cache
def byte_level() -> Trained:
    """Byte-level BPE with so few merges that its ids fit the fakes' vocabulary after a shift."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the end of the text, naïve"] * 4, trainer)
    return Trained(tokenizer)


class Renumbered:
    """A text's ids renumbered as 3, 4, 5, ..., so that a model of 97 ids can write it."""

    def __init__(self, inner: Trained, text: str) -> None:
        self.inner = inner
        self.ids = sorted(set(inner.encode(text)))
        assert len(self.ids) < 80

    def encode(self, text: str) -> list[int]:
        return [3 + self.ids.index(i) for i in self.inner.encode(text)]

    def decode(self, token_ids: Values[int]) -> str:
        return self.inner.decode([self.ids[i - 3] for i in token_ids])


@pytest.mark.parametrize("stop", ["🧵", "語", "日本語", "é漢", " end", "x🎉 the"])
@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_stop_of_characters_spread_over_tokens(stop: str, k: int) -> None:
    asked, answer = "the naïve 日", f"😀 of the {stop}, and so on and on"
    decoder = Renumbered(byte_level(), asked + answer)
    prompt, tokens = decoder.encode(asked), decoder.encode(answer)
    want, reason = expected(decoder, tokens, (stop,), frozenset(), len(tokens))
    assert reason == "stop" and len(want) < len(tokens)
    target = script(tokens, prompt)
    for place in range(0, len(tokens), 2):
        finder = StopFinder(decoder, prompt, (stop,))
        draft = wrong_from(target, place, prompt)
        seq, _ = run_one(
            target, draft, k, prompt=prompt, finder=finder, new_tokens=len(tokens), eos=frozenset()
        )
        assert seq.output_ids == want and seq.finish_reason == "stop"
        assert cut_at_stop(decoder.decode(seq.output_ids), (stop,)) == answer.split(stop)[0]
