"""The prices of measured acceptance at other models' round times."""

import pytest

from scripts.bench.prices import prices, rates


def sample(accepted: list[int], proposed: list[int], without: int = 0) -> dict[str, object]:
    return {
        "accepted_per_round": accepted,
        "proposed_per_round": proposed,
        "rounds_without_proposal": without,
    }


def test_rates_count_rounds_without_a_proposal_and_leave_out_short_ones() -> None:
    found = [sample([2, 0, 1, 1], [2, 2, 2, 1]), sample([1], [2], without=4)]
    # Eight rounds of two proposals or of none: three accept the first, one both.
    assert rates(found, 2) == [3 / 8, 1 / 8]


def test_a_price_is_tokens_over_the_cost_of_a_round() -> None:
    rows = [
        {"batch_size": 4, "k": 0, "metrics": [{"round_ms": 3.0}, {"round_ms": 2.0}] * 2},
        {"batch_size": 4, "k": 2, "metrics": [{"round_ms": 5.0}]},
        {"batch_size": 4, "k": 3, "metrics": [{"round_ms": 9.0}]},
    ]
    (price,) = prices("an arm", rows, {2: [sample([2, 0], [2, 2])]})
    assert (price.length, price.needed, price.ratio) == (2.0, 2.0, 1.0)
    # c + c^2 = 1 at the golden ratio's inverse: then a round of two proposals writes two tokens.
    assert price.row("8B") == "| 8B | 4 | an arm | 2 | 5.00 | 2.00 | 1.00 | 2.00 | 62% |"


def test_a_round_that_costs_more_than_all_its_tokens_never_breaks_even() -> None:
    rows = [{"batch_size": 1, "k": k, "metrics": [{"round_ms": 1.0 + 2 * k}]} for k in (0, 1)]
    (price,) = prices("an arm", rows, {1: [sample([1], [1])]})
    assert price.row("8B").endswith("| 3.00 | none |")
    assert price.ratio == pytest.approx(2 / 3)
