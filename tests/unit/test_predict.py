"""Expected rounds against an enumeration of all possible rounds."""

import random
from itertools import pairwise

import pytest

from specdec_cli.experiment.forecasts import (
    Text,
    expected_rounds,
    iid_length,
    with_recorded,
)
from tests.rounds import greedy_rounds


def enumerated(text: Text, k: int) -> tuple[float, float, float, float]:
    """Drafts, plain rounds, proposed and accepted tokens, from the tree of all outcomes."""
    assert text.accept is not None

    def walk(start: int) -> tuple[float, float, float, float]:
        if start >= len(text.accept or ()):
            return 0.0, 0.0, 0.0, 0.0
        asked = max(0, min(k, text.limit - start - 1, text.draft_limit - start))
        total = [float(asked > 0), float(asked == 0), float(asked), 0.0]
        chance = 1.0
        for accepted in range(asked + 1):
            at = start + accepted
            known = (text.accept or ())[at] if at < len(text.accept or ()) else 0.0
            stops = 1.0 if accepted == asked else 1.0 - known
            kept = min(accepted, len(text.accept or ()) - start)
            rest = walk(start + accepted + 1)
            for place, value in enumerate(rest):
                total[place] += chance * stops * value
            total[3] += chance * stops * kept
            chance *= 1.0 - stops
            if chance == 0.0:
                break
        return total[0], total[1], total[2], total[3]

    return walk(0)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("draft_limit", [3, 100])
@pytest.mark.parametrize("limit", [9, 30])
@pytest.mark.parametrize("is_greedy", [True, False])
def test_expected_rounds(k: int, draft_limit: int, limit: int, is_greedy: bool) -> None:
    rng = random.Random(k)
    accept = tuple(float(rng.random() < 0.6) if is_greedy else rng.random() for _ in range(9))
    text = Text(limit=limit, draft_limit=draft_limit, accept=accept)
    found = expected_rounds([text], k)
    expected = enumerated(text, k)
    assert (found.drafts, found.plain, found.draft_tokens, found.accepted) == pytest.approx(
        expected
    )
    if is_greedy:
        rounds = list(greedy_rounds(text, k))
        assert sum(p > 0 for p, _ in rounds) == found.drafts
        assert sum(a for _, a in rounds) == found.accepted


def test_rounds_by_hand() -> None:
    text = Text(limit=8, draft_limit=99, accept=(1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0))
    # Two are accepted and the third is not; then three and the target's own; then nothing is left.
    assert list(greedy_rounds(text, 3)) == [(3, 2), (3, 3), (0, 0)]
    assert list(greedy_rounds(text, 1)) == [(1, 1), (1, 0), (1, 1), (1, 1), (0, 0)]
    assert list(greedy_rounds(text, 0)) == [(0, 0)] * 8


def test_a_text_that_ends_in_an_accepted_proposal() -> None:
    """The text's last token ended it early, so proposals after it are not accepted."""
    text = Text(limit=20, draft_limit=99, accept=(1.0, 1.0, 1.0))
    assert list(greedy_rounds(text, 5)) == [(5, 3)]
    found = expected_rounds([text], 5)
    assert (found.drafts, found.draft_tokens, found.accepted) == (1.0, 5.0, 3.0)


def test_one_rate_for_every_token_gives_the_iid_formula() -> None:
    alpha, k, length = 0.7, 4, 4000
    text = Text(limit=length + 100, draft_limit=9999, accept=(alpha,) * length)
    found = expected_rounds([text], k)
    assert found.mean_acceptance_length == pytest.approx(iid_length(alpha, k), rel=2e-3)
    assert iid_length(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    assert iid_length(1.0, k) == k + 1


def test_draws_stand_below_the_rate_of_their_place() -> None:
    draws = (0.1, 0.6, 0.5, 0.1, 0.9, 0.1)
    text = Text(limit=9, draft_limit=99, draws=draws, rates=(0.8, 0.4))
    # 0.1 < 0.8 is accepted, 0.6 >= 0.4 is not; then 0.5 and 0.1 are, and 0.9 is the target's own.
    assert list(greedy_rounds(text, 2)) == [(2, 1), (2, 2), (2, 1)]
    assert [a for _, a in greedy_rounds(text, 1)] == [1, 1, 0, 1]


def test_longer_proposals_accept_no_less() -> None:
    rng = random.Random(1)
    text = Text(limit=80, draft_limit=999, accept=tuple(rng.random() for _ in range(60)))
    lengths = [expected_rounds([text], k).mean_acceptance_length for k in range(9)]
    assert all(a < b for a, b in pairwise(lengths))


def test_recorded_rounds_win_over_the_pass() -> None:
    text = Text(limit=6, draft_limit=99, accept=(1.0, 0.0, 1.0, 0.0, 1.0, 1.0))
    known, news = with_recorded(text, [(2, 2), (2, 1)])
    # Round one accepted 0 and 1 (the pass is wrong about 1), and 2 was the target's own. Round two
    # accepted 3 and rejected 4 (the pass is wrong about both).
    assert known.accept == (1.0, 1.0, 1.0, 1.0, 0.0, 1.0)
    assert news == 3


def test_recorded_rounds_of_a_head_win_too() -> None:
    rows = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (1.0, 0.0), (1.0,))
    text = Text(limit=5, draft_limit=99, ahead=rows)
    assert list(greedy_rounds(text, 2)) == [(2, 1), (2, 2)]
    known, news = with_recorded(text, [(2, 2), (1, 0)])
    assert known.ahead == ((1.0, 1.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0,)) and news == 2


def test_chances_that_depend_on_the_round() -> None:
    """The chance of token 1 is 0.25 in a round that begins before it, and 0.75 in one at it."""
    text = Text(limit=9, draft_limit=99, ahead=((0.5, 0.25, 1.0), (0.75, 0.0), (0.0,)))
    found = expected_rounds([text], 2)
    # A round begins at 1 with chance 0.5, and at 2 with 0.5 * 0.75 + 0.5 * 0.25.
    assert found.drafts == pytest.approx(1 + 0.5 + 0.5)
    assert found.accepted == pytest.approx(0.5 + 0.5 * 0.25 + 0.5 * 0.75)


def test_a_round_may_propose_less_than_is_asked() -> None:
    """An ended block counts as it is; one that the text cuts is as long as asked."""
    text = Text(limit=9, draft_limit=99, ahead=((0.5,), (), (0.5, 0.5), (0.5,)))
    assert [len(text.round_at(start, 3)) for start in range(4)] == [1, 0, 3, 3]
    found = expected_rounds([text.model_copy(update={"ahead": ((1.0,), (), (), ())})], 3)
    assert (found.drafts, found.draft_tokens, found.accepted, found.plain) == (1, 1, 1, 2)


def test_chains_of_a_lookup() -> None:
    text = Text(limit=5, draft_limit=99, chains=((2, 2), (0, 0), (1, 0), (4, 1), (0, 0)))
    assert list(greedy_rounds(text, 4)) == [(2, 2), (1, 1)]
    assert list(greedy_rounds(text, 1)) == [(1, 1), (1, 0), (1, 1)]
