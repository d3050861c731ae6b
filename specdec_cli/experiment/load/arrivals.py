"""Draws the due times of requests from a seed.

Random times are not rescaled afterwards, so their mean rate differs slightly from the requested
one.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specdec_cli.core.figures import Rate
from specdec_cli.recipe.objectives import objective

KINDS = "poisson, constant, gamma:SHAPE or a file of due times"
MEASURED, BEFORE = 0, 1  # random streams for requests in the measured window and before it
_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Process:
    """An arrival process.

    shape: the shape of the gamma distribution of the gaps between requests; 1 gives a Poisson
    process.
    times: the due times from a file, in seconds, ascending. After the last one, the same gaps
    repeat.
    """

    kind: Literal["gamma", "constant", "file"]
    shape: float = 1.0
    times: tuple[float, ...] = ()

    @property
    def own_rate(self) -> float | None:
        """The mean rate of a file's due times, in requests per second; None without a file."""
        span = self.times[-1] - self.times[0] if self.times else 0.0
        return (len(self.times) - 1) / span if span else None


def process_of(text: str) -> Process:
    """Parse the arrival process of a recipe. Raises ValueError with the reason if it is invalid."""
    if text in ("poisson", "constant"):
        return Process("gamma" if text == "poisson" else "constant")
    name, colon, number = text.partition(":")
    if name == "gamma" and colon:
        try:
            shape = float(number)
        except ValueError:
            shape = 0.0
        if not 0.001 <= shape <= 1e6:
            raise ValueError(f"the shape of gamma must be from 0.001 to 1e6, got {number!r}")
        return Process("gamma", shape)
    if not Path(text).is_file():
        raise ValueError(f"expected {KINDS}, got {text!r}")
    return Process("file", times=_times_in(Path(text)))


def _times_in(path: Path) -> tuple[float, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        raise ValueError(f"{path} cannot be read as text") from None
    times: list[float] = []
    for number, line in enumerate(lines, start=1):
        try:
            due = float(line) if line.strip() else None
        except ValueError:
            due = math.nan
        if due is None:
            continue
        earliest = times[-1] if times else 0.0
        if not (math.isfinite(due) and due >= earliest):
            told = f"expected seconds from {earliest:.15g} on, got {line.strip()!r}"
            raise ValueError(f"{path}:{number}: {told}")
        times.append(due)
    if len(times) < 2 or times[0] == times[-1]:
        raise ValueError(f"{path} has fewer than two different times")
    return tuple(times)


def gaps(process: Process, rate: Rate, seed: int, stream: int) -> Iterator[float]:
    """Yield the seconds between requests, endlessly. The first value is the time before the first
    request.

    The random numbers depend only on seed, rate and stream. So the gaps are the same at every k and
    for every engine, and a longer run begins with the gaps of a shorter one. Times from a file may
    start at any value, so the first of them is moved to at most one mean gap after the start.

    stream: `MEASURED` or `BEFORE`.
    """
    if rate == "inf":
        yield from cycle([0.0])
    elif process.kind == "constant":
        yield from cycle([1.0 / rate])
    elif process.kind == "file":
        times = process.times
        mean = (times[-1] - times[0]) / (len(times) - 1)
        yield min(times[0], mean)  # the times in a file may start at any value
        yield from cycle([*(after - before for before, after in pairwise(times)), mean])
    else:
        key = int(np.float64(rate).view(np.uint64))
        rng = np.random.Generator(np.random.PCG64([seed, key, stream]))
        while True:
            drawn = rng.gamma(process.shape, 1.0 / (rate * process.shape), _CHUNK)
            yield from map(float, drawn)


@dataclass(frozen=True, slots=True)
class Offered:
    """The load of a run, as stored in its settings.

    rates: the request rates, ascending, with inf last.
    arrivals: the arrival process, as written in the recipe.
    slo: the largest allowed value of each latency in milliseconds, by name, such as `ttft_ms`.
    """

    rates: tuple[Rate, ...]
    arrivals: str
    seed: int
    duration_s: float | None
    slo: Mapping[str, float]

    @classmethod
    def of(cls, section: Mapping[str, Any], seed: int) -> "Offered":
        """Read the load from the recipe's section `load`."""
        return cls(
            rates=tuple(section["request_rate"]),
            arrivals=section["arrivals"],
            seed=seed,
            duration_s=section["duration_s"],
            slo={f"{name}_ms": objective(name, text) for name, text in section["slo"].items()},
        )

    def num_measured(self, prompts: int, repeats: int, rate: Rate) -> int:
        """The number of requests to measure at a rate."""
        fewest = prompts * repeats
        if rate == "inf" or self.duration_s is None:
            return fewest
        # With floats, 0.07 * 100 is slightly more than 7, and `ceil` would return 8.
        asked = Fraction(str(rate)) * Fraction(str(self.duration_s))
        return max(fewest, math.ceil(asked))
