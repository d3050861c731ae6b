"""Tables for other programs: full names, and figures as recorded."""

from specdec_cli.core.figures import STAGES, TTFT_PARTS
from specdec_cli.experiment.folders.conclusions import CategoryComparison, Comparison
from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.cells import Column, Table, Value
from specdec_cli.report.folder import ReportedRun
from specdec_cli.report.tables import PERCENTILES, counts_experts

_BREAK_EVEN = ("tokens_per_round", "draft_acceptance_rate", "alpha")
_SETTING = ("draft", "target_tp", "draft_tp", "k", "batch_size")


def _setting(point: Point) -> tuple[Value, ...]:
    return tuple(getattr(point, name) for name in _SETTING)


def raw_points(run: ReportedRun) -> Table:
    """One row a point with every figure of it."""
    names: tuple[str, ...] = (
        "decode_tokens_per_second",
        "output_tokens_per_second",
        "mean_acceptance_length",
        "tokens_per_round",
        "draft_acceptance_rate",
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_prompts",
        "num_output_tokens",
        "num_rounds",
        *(f"{stage}_ms" for stage in STAGES),
        "round_ms",
        "prefill_ms",
        "predicted_speedup",
    )
    if counts_experts(run):
        names = (*names, "distinct_experts")
    spreads = [(name, p) for name in ("ttft_ms", "tpot_ms") for p in ("mean", *PERCENTILES)]
    parts = [name for name in TTFT_PARTS if any(_part(p, name) is not None for p in run.points)]
    setting: tuple[str, ...] = ("draft", "k", "batch_size")
    if run.is_comparison:
        setting = ("target_tp", "draft_tp", "batch_size", "k")
        names = (*names, "num_blocks", "speedup_vs_equal_tp")
    titles = (
        *setting,
        "status",
        "reason",
        "speedup",
        "speedup_lo",
        "speedup_hi",
        "mean_acceptance_length_lo",
        "mean_acceptance_length_hi",
        *(f"break_even_{name}" for name in _BREAK_EVEN),
        "break_even_tokens_per_round_lo",
        "break_even_tokens_per_round_hi",
        *names,
        *(f"{name.removesuffix('_ms')}_{p}_ms" for name, p in spreads),
        *(f"ttft_{name}_ms" for name in parts),
    )
    rows = [
        (
            *(getattr(point, name) for name in setting),
            point.status,
            point.reason,
            point.speedup,
            *(point.speedup_ci or (None, None)),
            *(point.mean_acceptance_length_ci or (None, None)),
            *(getattr(point.break_even, name, None) for name in _BREAK_EVEN),
            *(getattr(point.break_even, "tokens_per_round_ci", None) or (None, None)),
            *(point.number(name) for name in names),
            *(point.number(name, p) for name, p in spreads),
            *(_part(point, name) for name in parts),
        )
        for point in run.points
    ]
    return Table("points", "", tuple(map(Column, titles)), tuple(rows))


def _part(point: Point, name: str) -> float | None:
    """A part of the mean time to the first token; None where it was not recorded."""
    metrics = point.metrics
    return (metrics.ttft_parts_ms or {}).get(name) if metrics is not None else None


def raw_comparisons(run: ReportedRun) -> Table:
    """One row for each two arms, and one for each of their categories."""
    rows = []
    for one in run.comparisons:
        setting = (one.batch_size, one.arm.draft, one.arm.k, one.against.draft, one.against.k)
        parts: list[tuple[str | None, Comparison | CategoryComparison]] = [(None, one)]
        parts += one.per_category.items()
        for name, part in parts:
            ends = part.speed_ratio_ci or (None, None)
            rows.append((*setting, name, part.num_prompts, part.speed_ratio, *ends))
    sides = ("draft", "k", "against_draft", "against_k")
    figures = ("num_prompts", "speed_ratio", "speed_ratio_lo", "speed_ratio_hi")
    titles = ("batch_size", *sides, "category", *figures)
    return Table("comparisons", "", tuple(map(Column, titles)), tuple(rows))


def raw_acceptance(run: ReportedRun) -> Table:
    """One row a point and position."""
    rates = ("acceptance_rate", "conditional_acceptance_rate")
    rows = [
        (*_setting(point), position, *pair)
        for point in run.points
        if point.metrics is not None
        for position, pair in enumerate(
            zip(*(getattr(point.metrics, f"{rate}_per_pos") for rate in rates), strict=True),
            start=1,
        )
    ]
    return Table("acceptance", "", tuple(map(Column, (*_SETTING, "position", *rates))), tuple(rows))


def raw_categories(run: ReportedRun) -> Table:
    """One row a point and category."""
    rates = ("mean_acceptance_length", "draft_acceptance_rate")
    names = ("num_prompts", *rates, "speedup", "decode_tokens_per_second")
    intervals = ("speedup", "mean_acceptance_length")
    rows = [
        (
            *(*_setting(point), category, *(getattr(row, name) for name in names)),
            *(end for n in intervals for end in getattr(row, f"{n}_ci") or (None, None)),
        )
        for point in run.points
        for category, row in point.per_category.items()
    ]
    ends = (f"{name}_{end}" for name in intervals for end in ("lo", "hi"))
    titles = (*_SETTING, "category", *names, *ends)
    return Table("categories", "", tuple(map(Column, titles)), tuple(rows))
