"""The judgement of `scripts/proofs/disturbed.py` on its pairs of sweeps."""

from typing import Any

import pytest

from scripts.proofs.disturbed import Outcome, Pair, judged, line_of

DRAFT, NGRAM = (4, "draft"), (4, "ngram")


def outcome(*codes: str, best: tuple[int, str] = DRAFT, tied: tuple[Any, ...] = ()) -> Outcome:
    return Outcome(codes, best, (best, *tied), seconds=40.0, others=0.25)


def pairs(false: int, missed: int, wrong: int) -> list[Pair]:
    """20 pairs, of which so many are not as they should be."""
    return [
        (
            outcome(*["outlying_repeats"] * (i < false)),
            outcome(*["cpu_load"] * (i >= missed), best=NGRAM if i < wrong else DRAFT),
        )
        for i in range(20)
    ]


@pytest.mark.parametrize(
    ("false", "missed", "wrong", "code"),
    [(0, 0, 0, 0), (1, 1, 1, 0), (2, 0, 0, 1), (0, 2, 0, 1), (0, 0, 2, 1)],
)
def test_each_of_the_three_bounds_decides(
    false: int, missed: int, wrong: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judged(pairs(false, missed, wrong)) == code
    said = capsys.readouterr().out
    assert f"warned of {20 - missed} of 20 disturbed sweeps and of {false} of 20 quiet ones" in said
    assert f"the winner of {20 - wrong} of 20 disturbed sweeps is the quiet ones'" in said


def test_a_winner_that_is_tied_with_the_quiet_one_is_right() -> None:
    tied = [(outcome(), outcome("cpu_load", best=NGRAM, tied=(DRAFT,)))]
    assert judged(tied) == 0
    assert judged([(outcome(tied=(NGRAM,)), outcome("cpu_load", best=NGRAM))]) == 0
    assert judged([(outcome(), outcome("cpu_load", best=NGRAM))]) == 1


def test_a_pair_is_a_line() -> None:
    said = line_of(3, outcome(), outcome("cpu_load", "cpu_starved"))
    assert said == (
        "pair 3: quiet: no warning; best k = 4 with draft (0.25 processors busy otherwise) | "
        "disturbed: cpu_load, cpu_starved; best k = 4 with draft | 80 s"
    )
