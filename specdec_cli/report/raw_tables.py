"""Tables for other programs: full names, and figures as recorded."""

from collections.abc import Mapping, Sequence

from specdec_cli.core.figures import STAGES, TTFT_PARTS
from specdec_cli.experiment.folders.conclusions import CategoryComparison, Comparison
from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.cells import PERCENTILES, Column, Table, Value
from specdec_cli.report.folder import ReportedRun
from specdec_cli.report.tables import counts_experts

_SETTING = ("draft", "target_tp", "draft_tp", "k", "batch_size")
_LOAD = (
    *("offered_rate", "achieved_rate", "window_seconds", "num_requests", "num_failed"),
    *("num_unmeasured", "max_in_flight", "overloaded", "slo_attainment", "goodput"),
)
_FIGURES = (
    *("decode_tokens_per_second", "output_tokens_per_second", "mean_acceptance_length"),
    *("tokens_per_round", "draft_acceptance_rate", "num_drafts", "num_draft_tokens"),
    *("num_accepted_tokens", "num_prompts", "num_output_tokens", "num_rounds"),
    *(f"{part}_ms" for part in (*STAGES, "round", "prefill")),
    "predicted_speedup",
)


def _setting(point: Point) -> dict[str, Value]:
    return {name: getattr(point, name) for name in _SETTING}


def _ends(of: str, found: object, prefix: str = "") -> dict[str, Value]:
    """The ends of an interval, by column; of: the figure's name."""
    ends = getattr(found, f"{of}_ci", None) or (None, None)
    return {f"{prefix}{of}_{end}": value for end, value in zip(("lo", "hi"), ends, strict=True)}


def raw_points(run: ReportedRun) -> Table:
    """One row a point with every figure of it."""
    setting: tuple[str, ...] = ("draft", "k", "batch_size")
    names = (*_FIGURES, *(["distinct_experts"] if counts_experts(run) else ()))
    if run.is_comparison:
        setting = ("target_tp", "draft_tp", "batch_size", "k")
        names = (*names, "num_blocks", "speedup_vs_equal_tp")
    has_rates = any(point.load is not None for point in run.points)
    parts = [name for name in TTFT_PARTS if any(_part(p, name) is not None for p in run.points)]

    def row(point: Point) -> dict[str, Value]:
        even = point.break_even
        rate = {"request_rate": point.request_rate} if has_rates else {}
        return (
            rate
            | {name: getattr(point, name) for name in (*setting, "status", "reason", "speedup")}
            | _ends("speedup", point)
            | _ends("mean_acceptance_length", point)
            | {
                f"break_even_{name}": getattr(even, name, None)
                for name in ("tokens_per_round", "draft_acceptance_rate", "alpha")
            }
            | _ends("tokens_per_round", even, "break_even_")
            | {name: point.number(name) for name in names}
            | {
                f"{name}_{part}_ms": point.number(f"{name}_ms", part)
                for name in ("ttft", "tpot")
                for part in ("mean", *PERCENTILES)
            }
            | {f"ttft_{name}_ms": _part(point, name) for name in parts}
            | (_of_load(point) if has_rates else {})
        )

    return _table("points", [row(point) for point in run.points])


def _of_load(point: Point) -> dict[str, Value]:
    """The columns of a point's load, empty without one."""
    load = point.load
    found = {name: getattr(load, name, None) for name in _LOAD}
    found |= _ends("slo_attainment", load) | _ends("goodput", load)
    late = load.send_lag_ms if load is not None else None
    for part in ("mean", *PERCENTILES):
        found[f"e2el_{part}_ms"] = point.number("e2el_ms", part)
        found[f"send_lag_{part}_ms"] = getattr(late, part, None)
    return found


def _table(name: str, rows: Sequence[Mapping[str, Value]]) -> Table:
    """A table of rows by column; every row has the same columns."""
    columns = tuple(Column(title) for title in (rows[0] if rows else ()))
    return Table(name, "", columns, tuple(tuple(row.values()) for row in rows))


def _part(point: Point, name: str) -> float | None:
    """A part of the mean time to the first token; None where it was not recorded."""
    metrics = point.metrics
    return (metrics.ttft_parts_ms or {}).get(name) if metrics is not None else None


def raw_comparisons(run: ReportedRun) -> Table:
    """One row for each two arms, and one for each of their categories."""
    rows: list[dict[str, Value]] = []
    for one in run.comparisons:
        setting = {
            "batch_size": one.batch_size,
            **{"draft": one.arm.draft, "k": one.arm.k},
            **{"against_draft": one.against.draft, "against_k": one.against.k},
        }
        parts: list[tuple[str | None, Comparison | CategoryComparison]] = [(None, one)]
        for name, part in (*parts, *one.per_category.items()):
            figures = {"num_prompts": part.num_prompts, "speed_ratio": part.speed_ratio}
            rows.append(setting | {"category": name} | figures | _ends("speed_ratio", part))
    return _table("comparisons", rows)


def raw_acceptance(run: ReportedRun) -> Table:
    """One row a point and position."""
    rows = []
    for point in run.points:
        rates = ("acceptance_rate", "conditional_acceptance_rate")
        known = (getattr(point.metrics, f"{rate}_per_pos", None) or () for rate in rates)
        for position, pair in enumerate(zip(*known, strict=True), start=1):
            rows.append(
                _setting(point) | {"position": position} | dict(zip(rates, pair, strict=True))
            )
    return _table("acceptance", rows)


def raw_categories(run: ReportedRun) -> Table:
    """One row a point and category."""
    names = ("num_prompts", "mean_acceptance_length", "draft_acceptance_rate", "speedup")
    rows = [
        _setting(point)
        | {"category": category}
        | {name: getattr(row, name) for name in (*names, "decode_tokens_per_second")}
        | _ends("speedup", row)
        | _ends("mean_acceptance_length", row)
        for point in run.points
        for category, row in point.per_category.items()
    ]
    return _table("categories", rows)
