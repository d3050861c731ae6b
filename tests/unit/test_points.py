"""Points from samples: which intervals they may claim."""

from typing import Any

from specdec_cli.points import Key, Sample, measured_point
from specdec_cli.sweep.recommend import recommend


def sample(index: int, rounds: list[tuple[int, int]], seconds: float) -> Sample:
    """A prompt that got 12 tokens. rounds: proposed and accepted tokens of each."""
    return {
        "index": index,
        "category": "all",
        "token_ids": [1] * 12,
        "finish_reason": "length",
        "proposed_per_round": [p for p, _ in rounds],
        "accepted_per_round": [a for _, a in rounds],
        "rounds_without_proposal": 0 if rounds else 12,
        "num_preemptions": 0,
        "peak_memory_bytes": 1,
        "seconds": [seconds],
        "decode_seconds": [seconds],
        "round_share": [(len(rounds) or 12) / 4],
        "stage_ms": {},
        "ttft_ms": [1.0],
        "tpot_ms": [1.0],
    }


def points_of(samples: dict[Key, dict[int, Sample]]) -> list[dict[str, Any]]:
    plain = samples[Key("d", 4, 0)]
    return [measured_point(key, found, plain, None, seed=0) for key, found in samples.items()]


def test_prompts_that_share_one_batch_to_its_end_give_no_interval() -> None:
    """Their times are one observation, however many they are."""
    samples = {
        Key("d", 4, 0): {i: sample(i, [], 1.0) for i in range(4)},
        Key("d", 4, 2): {i: sample(i, [(2, 2)] * 4, 0.5) for i in range(4)},
    }
    plain, point = points_of(samples)
    assert point["speedup"] == 2.0 and point["speedup_ci"] is None
    assert point["per_category"]["all"]["speedup_ci"] is None
    assert point["mean_acceptance_length_ci"] == [3.0, 3.0]
    for known in (plain, plain["per_category"]["all"]):  # by definition
        assert (known["speedup"], known["speedup_ci"]) == (1.0, [1.0, 1.0])
    best = recommend([plain, point], samples, seed=0)
    assert (best["k"], best["tied"]) == (2, [2])
    assert "share a batch and end together, and so it has no interval" in best["reason"]


def test_a_mean_length_lies_between_one_and_k_plus_one() -> None:
    samples = {
        Key("d", 4, 0): {i: sample(i, [], 1.0) for i in range(2)},
        Key("d", 4, 1): {0: sample(0, [(1, 0)] * 12, 1.0), 1: sample(1, [(1, 1)] * 6, 0.5)},
    }
    _, point = points_of(samples)
    assert point["mean_acceptance_length_ci"] == [1.0, 2.0]  # of two prompts, t says 0.03 to 60
    assert point["speedup_ci"][0] < point["speedup"] < point["speedup_ci"][1]


def test_a_mean_length_lies_in_its_interval() -> None:
    """Prompts that are alike leave an interval without width, and rounding is not to move it."""
    for accepted in range(1, 7):
        rounds = [(3, 1)] * accepted + [(3, 2)] * 5
        samples = {
            Key("d", 4, 0): {i: sample(i, [], 1.0) for i in range(3)},
            Key("d", 4, 3): {i: sample(i, rounds, 0.5 + i) for i in range(3)},
        }
        _, point = points_of(samples)
        low, high = point["mean_acceptance_length_ci"]
        assert low <= point["metrics"]["mean_acceptance_length"] <= high


def test_the_order_of_prompts_changes_nothing() -> None:
    """Prompts end in another order in another batch size, or in a sweep of shards."""
    drawn = [sample(i, [(3, i % 4)] * (3 + i % 2), 0.4 + i / 10) for i in range(9)]
    found = []
    for order in (drawn, drawn[::-1], drawn[4:] + drawn[:4]):
        samples = {
            Key("d", 4, 0): {s["index"]: sample(s["index"], [], 1.0) for s in order},
            Key("d", 4, 3): {s["index"]: s for s in order},
        }
        found.append(points_of(samples)[1])
    for interval in ("mean_acceptance_length_ci", "speedup_ci"):
        assert found[0][interval] is not None
        assert found[0][interval] == found[1][interval] == found[2][interval]
