"""Keeps measured times of rounds, for policies that choose between proposal lengths."""

from collections import defaultdict
from statistics import median

from specdec_cli.core.parallel import TensorParallel

_TRIALS = 4  # rounds to time for each K; the first is a warm-up and does not count


class RoundCosts:
    """The measured times of rounds, for each number of slots and K. Every rank records its own
    times, but `of` returns rank 0's on all ranks, so that they choose the same K."""

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel
        self._seconds: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self._agreed: dict[tuple[int, tuple[int, ...]], dict[int, float]] = {}

    def add(self, slots: int, k: int, seconds: float) -> None:
        """Record a round's time, unless `_TRIALS` rounds with this number of slots and this k are
        already recorded."""
        found = self._seconds[slots, k]
        if len(found) < _TRIALS:
            found.append(seconds)

    def unmeasured(self, slots: int, lengths: tuple[int, ...]) -> int | None:
        """Return a K in `lengths` that has not been timed enough yet, or None."""
        missing = [k for k in lengths if len(self._seconds[slots, k]) < _TRIALS]
        return missing[-1] if missing else None

    def of(self, slots: int, lengths: tuple[int, ...]) -> dict[int, float]:
        """Return the median time of a round on rank 0, in milliseconds, for each K in `lengths`.
        All ranks must call this together."""
        key = slots, lengths
        if key not in self._agreed:
            mine = {k: 1e3 * median(self._seconds[slots, k][1:]) for k in lengths}
            self._agreed[key] = self._parallel.gather_objects(mine)[0]
        return self._agreed[key]
