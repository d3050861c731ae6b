"""Evaluates load points: computes goodput, overload and speed-ups from samples and windows.

Points are compared on the same requests at the same due times, so that differences are paired.
Intervals are computed over blocks of consecutive requests.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_cli.core.figures import Spread
from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.records import Key, Load, Point, Sample, Stretch, at_rate
from specdec_cli.experiment.folders.samples import Samples
from specdec_cli.experiment.load.arrivals import Offered
from specdec_cli.experiment.load.goodput import FEWEST, meets, ratio_interval, share_interval
from specdec_cli.experiment.points import Failure, measured

_LONGER = 4.0  # recommended duration, as a multiple of the shortest window with an interval
_LATE = 0.05  # smallest send delay to report, as a share of the mean gap between requests
_OTHER_LENGTH = 1.1  # smallest ratio of texts' mean lengths to report
_NO_LATENCIES = {name: Spread.of([]) for name in ("ttft_ms", "tpot_ms", "e2el_ms")}


def points_at_rate(
    offered: Offered,
    samples: Mapping[Key, Samples],
    stretches: Mapping[Key, Mapping[int, Stretch]],
    keys: Sequence[Key],
    failures: Mapping[Key, Failure],
) -> list[Point]:
    """Compute the points of one rate, in the order of `keys`."""
    found = []
    for key in keys:
        own = {} if key in failures else samples.get(key, {})
        fields = measured(key, own, {}, failures.get(key), offered.seed)
        point = Point(**key.as_dict(), predicted_speedup=None, **fields)
        if point.metrics is not None:
            load = load_of(key, own, list(stretches[key].values()), offered)
            of_plain = stretches.get(key.plain, {}).values()
            is_slow = load.overloaded or any(one.overloaded for one in of_plain)
            crowding = max([load.crowding, *(one.crowding for one in of_plain)])
            others = {} if is_slow or key.plain in failures else samples.get(key.plain, {})
            gain = _gain(own, others, crowding)
            # Latencies are measured from the due time. An overloaded point has no latencies,
            # because they grow without bound.
            whole = {"e2el_ms": Spread.of([ms for s in own.values() for ms in s.e2el_ms])}
            latencies = _NO_LATENCIES if load.overloaded else whole
            metrics = point.metrics.model_copy(update=latencies)
            point = point.model_copy(update={"load": load, "metrics": metrics} | gain)
        found.append(point)
    return found


def load_of(key: Key, samples: Samples, stretches: Sequence[Stretch], offered: Offered) -> Load:
    """Compute the record of a point's load. Failed requests count as not meeting the objectives.
    An overloaded point has no goodput, because its request times depend on the length of the
    run."""
    window = sum(one.window_seconds for one in stretches)
    count, answered = len(samples), sum(one.num_answered for one in stretches)
    ordered = [samples[number] for number in sorted(samples)]
    overloaded = any(one.overloaded for one in stretches)
    is_shown = bool(offered.slo) and not overloaded
    met = is_met(ordered, offered.slo) if is_shown else []
    crowding = max(one.crowding for one in stretches)
    share = float(np.mean(met)) if is_shown else None
    ends = share_interval(met, crowding) if is_shown else None
    rate = None if key.request_rate == "inf" else count / window
    good, good_ends = None, None
    if rate is not None and share is not None:
        good = share * rate
        good_ends = None if ends is None else [end * rate for end in ends]
    return Load(
        arrivals=offered.arrivals,
        seed=offered.seed,
        offered_rate=rate,
        achieved_rate=answered / window if window else None,
        window_seconds=window,
        num_requests=count,
        num_failed=sum(not s.could_run for s in ordered),
        num_unmeasured=sum(one.num_unmeasured for one in stretches),
        max_in_flight=max(one.max_in_flight for one in stretches),
        send_lag_ms=Spread.of([lag for s in ordered if (lag := s.send_lag_ms) is not None]),
        overloaded=overloaded,
        slo=dict(offered.slo),
        slo_attainment=share,
        slo_attainment_ci=ends,
        goodput=good,
        goodput_ci=good_ends,
        crowding=crowding,
    )


def is_met(samples: Sequence[Sample], slo: Mapping[str, float]) -> list[bool]:
    """Return for each request whether it was answered and met every objective."""
    return [
        s.could_run and meets(slo, {name: next(iter(getattr(s, name)), None) for name in slo})
        for s in samples
    ]


def _gain(own: Samples, plain: Samples, crowding: float) -> dict[str, Any]:
    """Compute the speed-up: the mean time of a request at k = 0 divided by the mean time at this
    point, over the requests whose time is known at both. The interval is over blocks of requests.
    There is none if `crowding`, the larger one of the two points, exceeds 1."""
    both = sorted(i for i in own.keys() & plain.keys() if own[i].e2el_ms and plain[i].e2el_ms)
    if not both:
        return {"speedup": None, "speedup_ci": None}
    value, ends = time_ratio([plain[i] for i in both], [own[i] for i in both], crowding)
    return {"speedup": value, "speedup_ci": [1.0, 1.0] if own[both[0]].k == 0 else ends}


def time_ratio(
    one: Sequence[Sample], other: Sequence[Sample], crowding: float
) -> tuple[float, list[float] | None]:
    """Divide the mean time of requests at one point by that of the same requests at another.

    Return the ratio and its interval; see `_gain`.
    """
    times = [[sample.e2el_ms[0] for sample in of] for of in (one, other)]
    ends = None if crowding > 1 else ratio_interval(times[0], times[1], crowding)
    return float(np.mean(times[0]) / np.mean(times[1])), ends


def load_warnings(points: Sequence[Point]) -> list[Notice]:
    """Return warnings about servers that fell behind, windows too short for an interval, requests
    that the client sent late, and texts that are longer or shorter than those of k = 0."""
    found = []
    plain = {p.request_rate: length for p in points if p.k == 0 and (length := _length(p))}
    for point in points:
        if (load := point.load) is None or point.request_rate is None:
            continue
        where = f"k = {point.k} {at_rate(point.request_rate)}"
        evidence = {"k": point.k, "draft": point.draft, "request_rate": point.request_rate}
        if load.overloaded:
            told = (
                f"{where} is overloaded: it answers {load.achieved_rate:.3g} requests a second; "
                "lower --request-rate"
            )
            found.append(Notice("overloaded", told, evidence))
        lacks = load.slo_attainment is not None and load.slo_attainment_ci is None
        if lacks and load.num_requests >= FEWEST:
            seconds = math.ceil(load.window_seconds * _LONGER * load.crowding)
            told = (
                f"{where}: the queue lasts too long for an interval of goodput: raise --duration "
                f"to {seconds} or more"
            )
            found.append(Notice("autocorrelated", told, evidence))
        late, rate = load.send_lag_ms.p99, load.offered_rate
        if late is not None and rate and late > _LATE * 1e3 / rate:
            told = (
                f"{where}: requests were sent late, one in a hundred by {late:.1f} ms or more; "
                "give the client free processors, or lower --request-rate"
            )
            whole = point.metrics.e2el_ms if point.metrics is not None else None
            lag, latency = load.send_lag_ms.mean, whole.mean if whole is not None else None
            share = lag / latency if lag and latency else None
            found.append(Notice("client_late", told, evidence | {"share_of_latency": share}))
        own, other = _length(point), plain.get(point.request_rate)
        if point.k and own and other and max(own / other, other / own) > _OTHER_LENGTH:
            told = (
                f"{where}: texts have {own:.3g} tokens on average, and {other:.3g} at k = 0, so "
                "latencies and speed-up compare texts of different lengths: make all texts equally "
                "long (--ignore-eos)"
            )
            found.append(Notice("lengths_differ", told, evidence))
    return found


def _length(point: Point) -> float | None:
    """Return the mean number of output tokens of a point's texts; None if it was not measured, or
    if the point is overloaded and so has no latencies to compare."""
    tokens, prompts = point.number("num_output_tokens"), point.number("num_prompts")
    if not tokens or not prompts or (point.load is not None and point.load.overloaded):
        return None
    return tokens / prompts
