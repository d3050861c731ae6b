"""Coverage of intervals of goodput and speed-ups, and calls of overload, on simulated servers.

Requests arrive at a server that answers some of them at a time and takes the others in order. Each
needs work with a gamma distribution of mean 1, like texts of some length. The more requests a
server answers at a time, the longer each may take. The share of requests that are answered in time
is known from long runs.

    python scripts/proofs/load.py [--trials N] [--arrivals gamma:SHAPE] [--slo ttft] [--unseen]
    python scripts/proofs/load.py --speedups [--trials N] [--unseen]

The constants of the interval were chosen on the servers of `SERVERS`, with Poisson arrivals and
with gamma:0.4. `--unseen` takes the servers of `UNSEEN` in their place.
"""

import argparse
import heapq
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec_cli.core.types import Request
from specdec_cli.experiment.folders.records import Key
from specdec_cli.experiment.load.arrivals import process_of
from specdec_cli.experiment.load.goodput import ratio_interval, share_interval
from specdec_cli.experiment.load.measuring import Stream, crowding, is_overloaded, stretch_of

_LONG, _SETTLED, _RUNS = 3000, 1000, 400
_FIRST = 0.1  # the mean time to a first token without waiting
SHARES = (0.1, 0.5, 0.9)
GAINS = (1.0, 1.15, 1.5)  # how much less work a request is at some k than at k = 0
_UNLIKE = 0.3  # the standard deviation of a request's work between two k, on a logarithmic scale
_SHOWN = 0.1  # cells with an interval in fewer runs show only their share
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Server:
    """slots: the most requests that are answered at a time. slowing: the time that each further
    request adds to the work of the others, in units of a request that is alone. texts: the shape of
    the distribution of work; texts of a smaller shape differ more."""

    slots: int
    slowing: float = 0.0
    texts: float = 4.0

    def pace(self, active: Any) -> Any:
        """The work that each of `active` requests gets done in one unit of time."""
        return 1 / (1 + self.slowing * np.maximum(np.asarray(active) - 1, 0))

    def capacity(self) -> float:
        return float(self.slots * self.pace(self.slots))


SERVERS = {
    "1 in turn": Server(1),
    "8 in turn": Server(8),
    "32 in turn": Server(32),
    "batch of 16": Server(16, 0.05),
    "all share one": Server(192, 1.0),
}
UNSEEN = {
    "2 in turn": Server(2, texts=1.5),
    "4 in turn": Server(4),
    "16 in turn": Server(16, texts=1.0),
    "batch of 8": Server(8, 0.15, texts=1.0),
    "batch of 32": Server(32, 0.05, texts=2.0),
    "64 share": Server(64, 0.3, texts=3.0),
}


def simulate(
    rng: np.random.Generator,
    server: Server,
    load: float,
    shape: float,
    runs: int,
    count: int,
    factor: Array | float = 1.0,
) -> tuple[Array, Array, Array]:
    """The times at which requests are due, have a first token and are done, of shape (runs, count).
    All runs begin empty.

    load: the share of the capacity. shape: that of the gaps between requests. factor: that of the
    work of each request, (runs, count).
    """
    gaps = rng.gamma(shape, 1 / (load * server.capacity() * shape), (runs, count))
    due, texts = np.cumsum(gaps, 1), server.texts
    work = rng.gamma(texts, 1 / texts, (runs, count)) * factor
    later = np.concatenate([due, np.full((runs, 1), np.inf)], 1)
    every, pace = np.arange(runs), server.pace(np.arange(server.slots + 1))
    ends = np.full((runs, server.slots), np.inf)  # by the work of one request since the start
    holds = np.zeros((runs, server.slots), int)
    done, first_token = np.full((2, runs, count), np.inf)
    now, worked = np.zeros(runs), np.zeros(runs)
    arrived, admitted, active = (np.zeros(runs, int) for _ in range(3))
    for _ in range(2 * count):
        first = ends.argmin(1)
        end = now + (ends[every, first] - worked) / pace[active]
        is_end = end <= later[every, arrived]
        then = np.where(is_end, end, later[every, arrived])
        worked += (then - now) * pace[active]
        now = then
        of = every[is_end]
        done[of, holds[of, first[of]]] = now[of]
        ends[of, first[of]] = np.inf
        active[of] -= 1
        arrived[~is_end] += 1
        of = every[(admitted < arrived) & (active < server.slots)]
        free = ends[of].argmax(1)
        ends[of, free] = worked[of] + work[of, admitted[of]]
        holds[of, free] = admitted[of]
        first_token[of, admitted[of]] = now[of]
        admitted[of] += 1
        active[of] += 1
    return due, first_token + rng.gamma(4.0, _FIRST / 4, (runs, count)), done


def window_of(due: Array, done: Array, count: int) -> tuple[slice, Array, bool] | None:
    """The measured requests, the number under way at the arrival of each, and whether the run is
    called overloaded. The window begins as in `Stream`. None if the run is too short."""
    first = float(done.min())
    settled = done[: int(np.searchsorted(due, first, "right"))].max()
    begin = min(count, max(-(-count // 10), int(np.searchsorted(due, settled, "right"))))
    if begin + count > len(due):
        return None
    part, ended = slice(begin, begin + count), np.sort(done)
    beside = np.arange(begin, begin + count) + 1 - np.searchsorted(ended, due[part], "right")
    until = due[begin] + (due[part][-1] - due[begin]) * count / (count - 1)
    answered = int(np.sum((done >= due[begin]) & (done <= until)))
    return part, beside, is_overloaded(beside.tolist(), answered)


def coverage(
    rng: np.random.Generator,
    server: Server,
    load: float,
    counts: tuple[int, ...],
    trials: int,
    shape: float = 1.0,
    slo: str = "e2el",
) -> list[tuple[float, list[float]]]:
    """For each number of measured requests: the share of trials with an interval, and the shares of
    trials whose interval holds the true share of good requests, by `SHARES`."""
    due, first, done = simulate(rng, server, load, shape, _RUNS, _LONG)
    whole = ((first if slo == "ttft" else done) - due)[:, _SETTLED:-_SETTLED].ravel()
    most = np.quantile(whole, SHARES)
    truths = [float(np.mean(whole <= one)) for one in most]
    due, first, done = simulate(rng, server, load, shape, trials, max(counts) * 3 // 2 + 100)
    latencies = (first if slo == "ttft" else done) - due
    found = []
    for count in counts:
        shown, size, hits = 0, 0, [0] * len(SHARES)
        for run in range(trials):
            if (window := window_of(due[run], done[run], count)) is None:
                continue
            part, beside, is_slow = window
            size, took = size + 1, latencies[run, part]
            kinds = [took.tolist(), (done - due)[run, part].tolist()]
            crowd = crowding(kinds, beside.tolist())
            ends = [share_interval((took <= bound).tolist(), crowd) for bound in most]
            if is_slow or None in ends:
                continue
            shown += 1
            for place, (end, truth) in enumerate(zip(ends, truths, strict=True)):
                hits[place] += end is not None and end[0] <= truth <= end[1]
        found.append((shown / size, [one / size for one in hits]))
    return found


def _pair(
    rng: np.random.Generator, server: Server, load: float, gain: float, runs: int, count: int
) -> tuple[Array, Array, Array]:
    """The times at which requests are due, and done at k = 0 and at another k. Their work differs
    at random, and by `gain`."""
    seed, done = int(rng.integers(2**31)), []
    for one in (1.0, gain):
        unlike = rng.normal(-(_UNLIKE**2) / 2, _UNLIKE, (runs, count))
        own = np.random.default_rng(seed)
        due, _, ends = simulate(own, server, load, 1.0, runs, count, np.exp(unlike) / one)
        done.append(ends)
    return due, *done


def speedups(
    rng: np.random.Generator,
    server: Server,
    load: float,
    gain: float,
    counts: tuple[int, ...],
    trials: int,
) -> list[tuple[int, int, int, int]]:
    """For each number of measured requests: the number of runs in which neither k is overloaded,
    those with an interval of the speed-up, those whose interval holds the true one, and those that
    call the other k faster."""
    truth = 1.0
    if gain != 1.0:
        due, plain, fast = _pair(rng, server, load, gain, _RUNS // 4, _LONG)
        took = [(done - due)[:, _SETTLED:-_SETTLED].mean() for done in (plain, fast)]
        truth = float(took[0] / took[1])
    due, plain, fast = _pair(rng, server, load, gain, trials, max(counts) * 3 // 2 + 100)
    found = []
    for count in counts:
        known = given = held = faster = 0
        for run in range(trials):
            windows = [window_of(due[run], done[run], count) for done in (plain, fast)]
            if any(one is None or one[2] for one in windows):
                continue
            part = next(one[0] for one in windows if one is not None)
            took = [(done - due)[run, part].tolist() for done in (plain, fast)]
            crowds = [
                crowding([own], one[1].tolist())
                for own, one in zip(took, windows, strict=True)
                if one is not None
            ]
            ends = ratio_interval(took[0], took[1], max(crowds))
            assert ends is not None
            known += 1
            faster += ends[0] > 1.0
            if max(crowds) <= 1:
                given += 1
                held += ends[0] <= truth <= ends[1]
        found.append((known, given, held, faster))
    return found


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
            end = max(request.arrives_at, free[0]) + rng.gamma(4.0, 0.25)
            heapq.heapreplace(free, end)
            heapq.heappush(ends, (end, request.index))
        answer(float("inf"))
        calls += stretch_of(key, count, stream.due, done).overloaded
    return calls / trials


def _print_speedups(rng: np.random.Generator, servers: dict[str, Server], trials: int) -> None:
    print(
        "| gain | of | with an interval | that holds the truth | called faster |\n"
        "|---|---|---|---|---|"
    )
    for gain in GAINS:
        sums = defaultdict[str, Any](lambda: np.zeros(4, int))
        for server in servers.values():
            for load in (0.3, 0.6, 0.8, 0.9):
                counts = (30, 60, 200, 600)
                rows = speedups(rng, server, load, gain, counts, trials)
                for count, row in zip(counts, rows, strict=True):
                    for group in ("all", f"load {load}", f"{count} requests"):
                        sums[group] += row
        for group, (known, given, held, faster) in sums.items():
            shares = given / known, held / max(1, given), faster / known
            told = " | ".join(f"{100 * one:.1f} %" for one in shares)
            print(f"| {gain} | {group} | {told} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--arrivals", default="poisson")
    parser.add_argument("--slo", choices=("e2el", "ttft"), default="e2el")
    parser.add_argument("--unseen", action="store_true")
    parser.add_argument("--speedups", action="store_true")
    args, rng = parser.parse_args(), np.random.default_rng(1)
    trials, shape = args.trials, process_of(args.arrivals).shape
    if args.speedups:
        _print_speedups(rng, UNSEEN if args.unseen else SERVERS, trials)
        return
    counts = (30, 60, 200, 600, 2000)
    print(f"coverage of the 95 % interval at {SHARES} good requests (runs with one), {trials} runs")
    print(f"| server | load | {' | '.join(map(str, counts))} |")
    shares, every = list[float](), list[float]()
    pooled = defaultdict[object, Array](lambda: np.zeros(2))  # hits, and runs with an interval
    for name, server in (UNSEEN if args.unseen else SERVERS).items():
        for load in (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9):
            cells = []
            rows = coverage(rng, server, load, counts, trials, shape, args.slo)
            for count, (given, hits) in zip(counts, rows, strict=True):
                held = [hit / given for hit in hits] if given >= _SHOWN else []
                shares += held
                every.append(given)
                for group in ("all", name, load, count):
                    pooled[group] += sum(hits), len(hits) * given
                text = ", ".join(f"{100 * one:.0f}" for one in held)
                cells.append(f"{text} ({given:.2f})".strip())
            print(f"| {name} | {load} | {' | '.join(cells)} |", flush=True)
    found = np.array(shares)
    print(
        f"{len(found)} percentages; {np.sum(found >= 0.93)} of 93 or more, "
        f"{np.sum((found >= 0.93) & (found <= 0.97))} of 93 to 97; "
        f"mean {100 * found.mean():.1f}, lowest {100 * found.min():.1f}; "
        f"{100 * np.mean(every):.0f} % of runs have an interval"
    )
    told = (f"{group} {100 * hits / given:.1f}" for group, (hits, given) in pooled.items() if given)
    print("of all given intervals, by server, load and requests:", ", ".join(told))
    counts = (60, 200, 1000)
    print(f"called overloaded, {trials // 10} trials; columns: {counts} requests")
    for servers in (2, 16):
        for load in (0.5, 0.8, 0.9, 1.1, 1.2, 1.5, 3.0):
            calls = [overloaded(rng, load, servers, count, trials // 10) for count in counts]
            shown = (f"{one:.3f}" for one in calls)
            print(f"{servers} servers, load {load:.1f}: ", *shown, flush=True)


if __name__ == "__main__":
    main()
