"""The order of points: complete at every turn, balanced over turns, decided by the seed."""

from collections import Counter
from itertools import pairwise

import pytest

from specdec_cli.experiment.measure import balanced


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 10])
def test_places_and_neighbours_are_balanced(count: int) -> None:
    points = [f"point {i}" for i in range(count)]
    height = count if count % 2 == 0 or count == 1 else 2 * count
    times = height // count
    for square in range(2):
        turns = [balanced(points, square * height + turn, 5) for turn in range(height)]
        assert all(sorted(turn) == sorted(points) for turn in turns)
        places = Counter(place for turn in turns for place in enumerate(turn))
        assert set(places.values()) == {times} and len(places) == count * count
        after = Counter(pair for turn in turns for pair in pairwise(turn))
        assert set(after.values()) <= {times} and len(after) == count * (count - 1)


def test_the_seed_decides() -> None:
    def turns(seed: int) -> list[list[int]]:
        return [balanced(range(6), turn, seed) for turn in range(12)]

    assert turns(1) == turns(1) != turns(2)
    assert turns(1)[:6] != turns(1)[6:]
