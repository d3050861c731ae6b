"""Points at a rate, from their samples and stretches: goodput, overload and speed-ups."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_cli.core.figures import Metrics, Spread
from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.records import Key, Load, Point, Sample, Stretch, rate_in_words
from specdec_cli.experiment.folders.samples import Samples, baseline_key, without_errors
from specdec_cli.experiment.load.arrivals import Offered
from specdec_cli.experiment.load.goodput import FEWEST, meets, ratio_interval, share_interval
from specdec_cli.experiment.points import Failure, measured

_LATE = 0.05  # of the mean gap
_NO_LATENCIES = {name: Spread.of([]) for name in ("ttft_ms", "tpot_ms", "e2el_ms")}


def points_at_rate(
    offered: Offered,
    samples: Mapping[Key, Samples],
    stretches: Mapping[Key, Mapping[int, Stretch]],
    keys: Sequence[Key],
    failures: Mapping[Key, Failure],
) -> list[Point]:
    """The points of one rate, in the order of `keys`."""
    found = []
    for key in keys:
        own = {} if key in failures else samples.get(key, {})
        fields = measured(key, own, {}, failures.get(key), offered.seed)
        point = Point(**key.as_dict(), predicted_speedup=None, **fields)
        if point.metrics is not None:
            load = load_of(key, own, list(stretches[key].values()), offered)
            plain = baseline_key(samples, key)
            of_plain = stretches.get(plain, {}).values()
            is_slow = load.overloaded or any(one.overloaded for one in of_plain)
            gain = _gain(own, {} if is_slow or plain in failures else samples.get(plain, {}))
            point = point.model_copy(
                update={"load": load, "metrics": _metrics(point.metrics, own, load)} | gain
            )
        found.append(point)
    return found


def _metrics(metrics: Metrics, own: Samples, load: Load) -> Metrics:
    """Latencies from the due time; none of them where they grow without end."""
    ends = [ms for s in own.values() for ms in s.e2el_ms]
    return metrics.model_copy(
        update=dict(_NO_LATENCIES) if load.overloaded else {"e2el_ms": Spread.of(ends)}
    )


def load_of(key: Key, samples: Samples, stretches: Sequence[Stretch], offered: Offered) -> Load:
    """The record of a point's load. Failed requests are not good. An overloaded server has no
    goodput, as the time that a request takes depends on how long it goes on."""
    window = sum(one.window_seconds for one in stretches)
    count, answered = len(samples), sum(one.num_answered for one in stretches)
    ordered = [samples[number] for number in sorted(samples)]
    overloaded = any(one.overloaded for one in stretches)
    is_shown = bool(offered.slo) and not overloaded
    met = is_met(ordered, offered.slo) if is_shown else []
    share, ends = float(np.mean(met)) if is_shown else None, None
    if is_shown and not any(one.autocorrelated for one in stretches):
        ends = share_interval(met, max(one.widening for one in stretches))
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
    )


def is_met(samples: Sequence[Sample], slo: Mapping[str, float]) -> list[bool]:
    """Whether each request was answered within every objective."""
    return [
        s.could_run and meets(slo, {name: next(iter(getattr(s, name)), None) for name in slo})
        for s in samples
    ]


def _gain(own: Samples, plain: Samples) -> dict[str, Any]:
    """Mean time of requests at k = 0 over that here, of those that both answered; the interval is
    over blocks of them."""
    both = sorted(without_errors(own).keys() & without_errors(plain).keys())
    times = [[of[i].e2el_ms[0] for i in both] for of in (plain, own)]
    if not both:
        return {"speedup": None, "speedup_ci": None}
    value = float(np.mean(times[0]) / np.mean(times[1]))
    ends = [1.0, 1.0] if own[both[0]].k == 0 else ratio_interval(*times)
    return {"speedup": value, "speedup_ci": ends}


def load_warnings(points: Sequence[Point]) -> list[Notice]:
    """Warnings of servers that fell behind, and of a client that did."""
    found = []
    for point in points:
        if (load := point.load) is None or point.request_rate is None:
            continue
        where = f"k = {point.k} at {rate_in_words(point.request_rate)}"
        draft = point.draft if point.k else None
        evidence = {"k": point.k, "draft": draft, "request_rate": point.request_rate}
        if load.overloaded:
            told = (
                f"{where} is overloaded: answers come at {load.achieved_rate:.3g} a second; lower "
                "--request-rate"
            )
            found.append(Notice("overloaded", told, evidence))
        lacks = load.slo_attainment is not None and load.slo_attainment_ci is None
        if lacks and load.num_requests >= FEWEST:
            told = f"{where}: the queue lasts too long for an interval of goodput: raise --duration"
            found.append(Notice("autocorrelated", told, evidence))
        late, rate = load.send_lag_ms.p99, load.offered_rate
        if late is not None and rate and late > _LATE * 1e3 / rate:
            told = (
                f"{where}: requests left late, one in a hundred by {late:.1f} ms or more; give the "
                "client free processors, or lower --request-rate"
            )
            found.append(Notice("client_late", told, evidence))
    return found
