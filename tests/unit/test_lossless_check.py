"""Diverging texts are judged by how nearly tied the target's tokens were."""

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from pydantic import ValidationError

from scripts.proofs import margins
from scripts.proofs.margins import Parting, partings
from specdec_cli.backends.base import Session
from specdec_cli.demo import demo_path
from specdec_cli.experiment.folders.conclusions import CheckResult, Diverging, Summary, Tokens
from specdec_cli.experiment.folders.records import Key
from specdec_cli.experiment.lossless_check import LosslessCheck, TextPair, failed_check
from specdec_cli.experiment.statistics.promise import (
    check_line,
    lossless_in_words,
    tokens_notice,
)

NOISE = 0.1  # of a logit between passes of one token and of several


class Fixed:
    """Logits of an idle engine: token 0 the best, token 1 less by a given gap."""

    def __init__(self, gap: float) -> None:
        self.gap = gap
        self.asked: list[tuple[list[int], int]] = []

    def logits_after(self, tokens: list[int], width: int, *_: object) -> np.ndarray:
        self.asked.append((tokens, width))
        return np.array([2.0, 2.0 - self.gap, -5.0 + NOISE * (width > 1)])


def checked(dtype: str, gap: float, *tokens: list[int]) -> tuple[CheckResult, Fixed]:
    """The check of texts that are [0, 0, 0] of the target alone, at k = 3."""
    engine, check = Fixed(gap), LosslessCheck(dtype)
    texts = {i: TextPair((7, 8), own, (0, 0, 0)) for i, own in enumerate(tokens)}
    check.compare(cast(Session, engine), Key("d", 1, 3), texts)
    return check.result, engine


@pytest.mark.parametrize(
    ("dtype", "gap", "passed", "words"),
    [
        ("bfloat16", 0.19, True, "lossless: 1 of 2 texts diverge in bfloat16, all near-ties"),
        ("bfloat16", 0.21, False, "not lossless: 1 of 2 texts diverge in bfloat16, 1 of them with"),
        ("float32", 0.0, False, "not lossless: 1 of 2 texts diverge in float32"),
    ],
)
def test_twice_the_rounding_is_a_near_tie(dtype: str, gap: float, passed: bool, words: str) -> None:
    found, engine = checked(dtype, gap, [0, 0, 0], [0, 1, 0])
    assert engine.asked == [([7, 8, 0], 1), ([7, 8, 0], 4)]
    assert found.passed is passed and check_line(found).startswith(words)
    assert found.diverging[0] | {"gap": None} == {
        "draft": "d", "batch_size": 1, "k": 3, "index": 1, "position": 1, "gap": None
    }  # fmt: skip
    assert found.largest_gap == pytest.approx(gap) and found.noise == pytest.approx(NOISE)
    told = [one.message for one in failed_check(found)]
    assert bool(told) is not passed
    remedy = "report it" if dtype == "float32" else "--dtype float32"
    assert all("do not use figures" in one and remedy in one for one in told)


@pytest.mark.parametrize(("length", "width"), [(2, 4), (99, 99), (999, 256)])
def test_a_first_token_is_compared_with_a_pass_over_the_prompt(length: int, width: int) -> None:
    engine, check, prompt = Fixed(0.1), LosslessCheck("bfloat16"), [7] * length
    check.compare(cast(Session, engine), Key("d", 1, 3), {0: TextPair(prompt, [1, 0], [0, 0])})
    assert engine.asked == [(prompt, 1), (prompt, width)]


@pytest.mark.parametrize("tokens", [[0, 0], [0, 0, 0, 0], []])
def test_a_text_that_ends_early_or_runs_on_is_no_near_tie(tokens: list[int]) -> None:
    """Both texts end by the same rules. It stays so beside a text that parts at a near-tie."""
    found, engine = checked("bfloat16", 0.1, tokens)
    assert engine.asked == [] and found.largest_gap is None and not found.passed
    assert (found.num_diverging, found.num_near_ties, found.num_unexplained) == (1, 0, 1)
    assert found.diverging[0]["gap"] is None and found.diverging[0]["position"] == len(tokens[:3])
    assert check_line(found) == (
        "not lossless: 1 of 1 texts diverge in bfloat16, 1 of them without a near-tie"
    )
    found, _ = checked("bfloat16", 0.1, tokens, [0, 1, 0])
    assert (found.num_diverging, found.num_near_ties, found.num_unexplained) == (2, 1, 1)
    assert not found.passed and found.largest_gap == pytest.approx(0.1)


def test_divergences_of_every_point_are_looked_at() -> None:
    """Each of two points has 20 divergences, and 16 of each are looked at."""
    engine, check = Fixed(0.1), LosslessCheck("bfloat16")
    texts = {i: TextPair([7], [0, 1], [0, 0]) for i in range(20)}
    for draft in ("one", "other"):
        check.compare(cast(Session, engine), Key(draft, 2, 1), texts)
    found = check.result
    assert (found.num_diverging, found.num_near_ties) == (40, 32)
    gaps = [one["gap"] for one in found.diverging if one["draft"] == "other"]
    assert [gap is None for gap in gaps] == [False] * 16 + [True] * 4


def test_margins_are_asked_where_two_texts_part() -> None:
    """A text that only ends earlier parts nowhere. Each batch size has a baseline of its own."""
    rows = [(0, 1, [3, 4]), (2, 1, [3, 5]), (0, 8, [3, 5, 6]), (2, 8, [3, 5])]
    samples = [
        {"draft": "d", "k": k, "batch_size": b, "index": 0, "prompt_token_ids": [9], "token_ids": t}
        for k, b, t in rows
    ]
    assert partings(samples) == {("d", 1, 2): [Parting([9, 3], (5, 4))], ("d", 8, 2): []}


def test_margins_take_a_model_by_a_recipe_s_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    taken: list[Path] = []
    monkeypatch.setattr(margins, "Judge", taken.append)
    (tmp_path / "samples.jsonl").touch()
    for target in ("demo:target", str(demo_path("demo:target"))):
        monkeypatch.setattr("sys.argv", ["margins.py", str(tmp_path), "--target", target])
        assert margins.main() == 0
    assert taken == [demo_path("demo:target")] * 2
    assert capsys.readouterr().out.count("0 texts part") == 2


def test_the_same_texts_need_no_logits_and_no_texts_are_no_proof() -> None:
    found, engine = checked("bfloat16", 1.0, [0, 0, 0])
    assert found.passed and engine.asked == []
    assert check_line(found).startswith(
        "lossless: the same greedy tokens in bfloat16 (1 prompt, 1 "
    )
    assert not checked("float32", 1.0)[0].passed
    short, _ = checked("float32", 1.0, [0, 0])  # a text that ended early parts there
    assert short.diverging[0]["position"] == 2 and not short.passed


def test_a_report_says_the_promise_and_how_it_was_kept() -> None:
    same = Tokens(compared=True, must_be_identical=True, identical=True, diverging=[])
    told = lossless_in_words(Summary(tokens=same))
    assert told is not None and told.startswith("Losslessness: every point has the same text")
    where = Diverging(batch_size=1, k=3, num_prompts=12, num_diverging=7, first=0)
    broken = same.model_copy(update={"identical": False, "diverging": [where]})
    (broken_told,) = tokens_notice(broken)
    assert all(s in broken_told.message for s in ("7 of 12 prompts", "--check-lossless"))
    assert not tokens_notice(same)
    narrow = Tokens(compared=True, must_be_identical=False, identical=False, diverging=[where])
    told = lossless_in_words(Summary(tokens=narrow))
    assert told is not None and "7 of 12 prompts at batch size 1, k = 3" in told
    assert "nearly tied" in told and "`--check-lossless` says" in told
    check, _ = checked("bfloat16", 0.19, [0, 1, 0])
    told = lossless_in_words(Summary(tokens=narrow, lossless_check=check))
    assert told is not None and "all near-ties" in told and "`--check-lossless`" not in told
    sampled = Tokens(compared=False, must_be_identical=False, identical=None, diverging=[])
    told = lossless_in_words(Summary(tokens=sampled))
    assert told is not None and "was not checked" in told and "distribution" in told
    assert lossless_in_words(Summary()) is None
    with pytest.raises(ValidationError, match="it says that points differ but does not list them"):
        Tokens(compared=True, must_be_identical=True, identical=False, diverging=[])
