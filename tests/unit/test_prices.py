"""The prices of measured acceptance at other models' stage times."""

import pytest

from scripts.bench.prices import Stages, best_price, lengths_of, rates, read_stages


def sample(
    accepted: list[int], proposed: list[int], without: int = 0, draft: str = "an arm"
) -> dict[str, object]:
    return {
        "draft": draft,
        "k": max(proposed),
        "accepted_per_round": accepted,
        "proposed_per_round": proposed,
        "rounds_without_proposal": without,
    }


def test_rates_leave_out_last_rounds_and_count_rounds_in_which_n_grams_found_nothing() -> None:
    found = [
        sample([2, 0, 1, 1], [2, 2, 2, 1], draft="ngram"),
        sample([1], [2], without=4, draft="ngram"),
    ]
    # Eight rounds of two proposals or of none: three accept the first, one both.
    assert rates(found, 2) == [3 / 8, 1 / 8]
    assert lengths_of(found, "ngram") == {2: 1.5} and not lengths_of(found, "an arm")
    # A draft proposes nothing only in the last round, with room for a single token.
    found = [sample([2, 0, 1, 1], [2, 2, 2, 1]), sample([1], [2], without=1)]
    assert rates(found, 2) == [3 / 4, 1 / 4] and lengths_of(found, "an arm") == {2: 2.0}


def test_a_price_is_tokens_over_the_cost_of_a_round() -> None:
    stages = Stages("8B", 4, {0: 2.0, 4: 4.0}, 0.5, {"an arm": (0.5, 0.5)})
    assert stages.round_ms(None, 0) == 2.5
    assert stages.round_ms("an arm", 2) == 3.0 + 0.5 + 1.5
    price = best_price(stages, "an arm", {2: 2.0, 3: 2.1})
    assert (price.k, price.length, price.needed, price.ratio) == (2, 2.0, 2.0, 1.0)
    # c + c^2 = 1 at the golden ratio's inverse: then a round of two proposals writes two tokens.
    assert price.chance == pytest.approx(0.618, abs=1e-3)


def test_scoring_goes_on_with_its_last_slope() -> None:
    stages = Stages("8B", 1, {4: 5.0, 0: 2.0, 2: 3.0}, 0.5, {"an arm": (0.0, 0.0)})
    scoring = [stages.round_ms("an arm", k) - 0.5 for k in (0, 1, 2, 3, 4, 6)]
    assert scoring == [2.0, 2.5, 3.0, 4.0, 5.0, 7.0]


def test_a_round_that_costs_more_than_all_its_tokens_never_breaks_even() -> None:
    price = best_price(Stages("8B", 1, {0: 1.0}, 0.0, {"an arm": (0.0, 2.0)}), "an arm", {1: 2.0})
    assert price.chance is None and price.ratio == pytest.approx(2 / 3)


def test_rounds_that_were_measured_are_the_sums_of_their_stages() -> None:
    """The rows are those of docs/performance-blocks.md and docs/performance-ranks.md."""
    found = {(s.model, s.batch_size): s for s in read_stages()}
    for model, batch_size, method, k, ms in [
        ("8B", 1, "DFlash", 7, 5.11),
        ("8B", 1, "DFlash", 15, 5.47),
        ("8B", 1, "EAGLE-3", 7, 5.62),
        ("8B", 8, "DFlash", 15, 7.09),
        ("8B", 8, "DSpark", 7, 6.26),
        ("8B", 32, "DFlash", 7, 9.68),
        ("8B", 32, "DFlash", 15, 16.14),
        ("8B", 32, "DSpark", 7, 10.01),
        ("8B", 32, "EAGLE-3", 7, 9.72),
        ("70B, TP 4", 1, "draft", 5, 12.52),
        ("70B, TP 4", 8, "EAGLE-3", 5, 13.63),
        ("70B, TP 4", 32, "draft", 5, 21.87),
        ("70B, TP 4", 32, "EAGLE-3", 5, 20.07),
    ]:
        assert found[model, batch_size].round_ms(method, k) == pytest.approx(ms, rel=0.02), method
