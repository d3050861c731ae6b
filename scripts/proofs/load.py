"""Coverage of goodput's interval, and calls of overload, on simulated queues (M/G/c).

Requests arrive as a Poisson process at several servers, which take them in order. Each takes a time
with a gamma distribution of mean 1, like texts of some length. The share of requests that are
answered in time is known from a very long run.

    python scripts/proofs/load.py [--trials N]
"""

import argparse
import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec_cli.core.types import Request
from specdec_cli.experiment.folders.records import Key
from specdec_cli.experiment.load.arrivals import process_of
from specdec_cli.experiment.load.goodput import share_interval
from specdec_cli.experiment.load.measuring import Stream, crowding, in_flight, stretch_of

_SHAPE, _LONG, _SETTLED = 4.0, 200_000, 1000


def queue(due: Sequence[float], work: Sequence[float], servers: int) -> list[float]:
    """The time at which each request is done."""
    free, done = [0.0] * servers, []
    for at, spent in zip(due, work, strict=True):
        done.append(max(at, free[0]) + spent)
        heapq.heapreplace(free, done[-1])
    return done


def latencies(rng: np.random.Generator, load: float, servers: int, count: int) -> Any:
    """The time that each request takes, and the number of requests under way at its arrival."""
    due = np.cumsum(rng.exponential(1 / (load * servers), count))
    work = rng.gamma(_SHAPE, 1 / _SHAPE, count)
    done = queue(due.tolist(), work.tolist(), servers)
    return np.array(done) - due, np.array(in_flight(due.tolist(), done, due.tolist()))


def coverage(
    rng: np.random.Generator, load: float, servers: int, share: float, count: int, trials: int
) -> tuple[float, float]:
    """The share of trials with an interval, and of those whose interval holds the true share of
    good requests.

    load: the share of the capacity. share: the quantile that is the objective. count: the number of
    measured requests.
    """
    whole = latencies(rng, load, servers, _LONG)[0][_SETTLED:]
    most = np.quantile(whole, share)
    truth, given, hits, before = float(np.mean(whole <= most)), 0, 0, 100 + count // 10
    for _ in range(trials):
        took, beside = (one[before:] for one in latencies(rng, load, servers, before + count))
        if (crowd := crowding(took, beside)).is_lasting:
            continue
        low, high = share_interval([bool(one) for one in took <= most], crowd.widening) or (1, 0)
        given, hits = given + 1, hits + (low <= truth <= high)
    return given / trials, hits / trials


def overloaded(
    rng: np.random.Generator, load: float, servers: int, count: int, trials: int
) -> float:
    """The share of runs that are called overloaded, with the stream of a real measurement."""
    process, key = process_of("poisson"), Key(None, 0, 0, request_rate=1.0)
    calls = 0
    for seed in rng.integers(2**31, size=trials):
        stream = Stream([Request(0, (1,))], process, load * servers, count, int(seed))
        free, ends = [0.0] * servers, list[tuple[float, int]]()
        done: dict[int, float] = {}

        def answer(
            until: float, stream: Stream = stream, ends: Any = ends, done: Any = done
        ) -> None:
            while ends and ends[0][0] <= until and not stream.is_over:
                at, number = heapq.heappop(ends)
                done[number] = at
                stream.answered(number)

        for request in stream:
            answer(request.arrives_at)
            if stream.is_over:
                break
            end = max(request.arrives_at, free[0]) + rng.gamma(_SHAPE, 1 / _SHAPE)
            heapq.heapreplace(free, end)
            heapq.heappush(ends, (end, request.index))
        answer(float("inf"))
        calls += stretch_of(key, count, stream.due, done).overloaded
    return calls / trials


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=1000)
    trials, rng = parser.parse_args().trials, np.random.default_rng(1)
    counts = (60, 200, 600, 2000)
    print(f"coverage of the 95 % interval (runs with one; with a wrong one), {trials} trials")
    print(f"columns: {counts} requests")
    for load in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9):
        for share in (0.7, 0.9):
            row = [coverage(rng, load, 8, share, count, trials) for count in counts]
            shown = (f"{b / a if a else 0:.2f} ({a:.2f}, {a - b:.3f})" for a, b in row)
            print(f"load {load:.1f}, {share:.0%} good: ", *shown, flush=True)
    counts = (60, 200, 1000)
    print(f"called overloaded, {trials // 4} trials; columns: {counts} requests")
    for servers in (2, 16):
        for load in (0.5, 0.8, 0.9, 1.1, 1.2, 1.5, 3.0):
            calls = [overloaded(rng, load, servers, count, trials // 4) for count in counts]
            shown = (f"{one:.3f}" for one in calls)
            print(f"{servers} servers, load {load:.1f}: ", *shown, flush=True)


if __name__ == "__main__":
    main()
