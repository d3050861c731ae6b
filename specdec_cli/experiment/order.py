"""The order in which the points of an experiment take turns.

Knows no points: any values can be ordered.
"""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def balanced(values: Sequence[T], turn: int, seed: int) -> list[T]:
    """The order of `values` at a turn, the same on every rank.

    Over n turns (2n, if n is odd) each value comes once (twice) at every place, and once (twice)
    right after every other value: what a point leaves behind, such as a warm cache or a hot
    device, meets all points alike. These are the rows of a Williams square (Williams 1949,
    Experimental designs balanced for the estimation of residual effects), with values and rows
    shuffled by the seed, anew for each square.
    """
    n = len(values)
    if n < 2:
        return list(values)
    height = n if n % 2 == 0 else 2 * n
    square, row = divmod(turn, height)
    shuffled = random.Random(f"{seed} {square}")
    labels = shuffled.sample(range(n), n)
    row = shuffled.sample(range(height), height)[row]
    # 0, 1, n - 1, 2, n - 2 ...: neighbours differ by each distance once.
    steps = [(place + 1) // 2 if place % 2 else (n - place // 2) % n for place in range(n)]
    if row >= n:
        steps.reverse()
    return [values[labels[(step + row) % n]] for step in steps]
