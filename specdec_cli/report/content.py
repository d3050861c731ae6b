"""The content of a report, the same for every format."""

from collections.abc import Mapping
from typing import Any

from specdec_cli.experiment.folders.records import Point
from specdec_cli.experiment.statistics.promise import lossless_in_words
from specdec_cli.report import findings, tables
from specdec_cli.report.card import card
from specdec_cli.report.cells import Table
from specdec_cli.report.findings import Finding
from specdec_cli.report.folder import ReportedRun
from specdec_cli.report.vllm import deployment


class Content:
    """The content of a report on a run, complete or not.

    answers: one by batch size. reasons: the run's own words for those that are decided. lossless:
    how the promise was kept. tables: by name, None if there is nothing to show. category_point,
    shown: the point that categories are of, in words and itself.
    """

    def __init__(self, run: ReportedRun) -> None:
        self.run = run
        self.bests = findings.best_by_batch_size(run)
        self.title = f"specdec {run.kind}: {run.path.resolve().name}"
        self.headline = findings.headline(run, self.bests)
        self.answers = [findings.answer(run, best) for best in self.bests]
        decided = [best for best in self.bests if best.reason and not best.is_open]
        self.reasons = list(dict.fromkeys(best.reason for best in decided))
        self.reasons += tables.pairs_not_run(run)
        self.notices = findings.warnings(run)
        self.warnings = [one.message for one in self.notices]
        self.lossless = lossless_in_words(run.summary)
        self.setup = _setup(run)
        shown = _point_for_categories(run, self.bests)
        of_shown = next((b for b in self.bests if shown and b.level == shown.level), None)
        self.tables: Mapping[str, Table | None] = {
            "results": tables.results(run, self.bests),
            "load": tables.load(run, self.bests),
            "degrees": tables.degrees(run),
            "break_even": tables.break_even(run),
            "comparisons": tables.comparisons(run),
            "category_pairs": tables.category_pairs(run),
            "rounds": tables.times_of_a_round(run),
            "latencies": tables.latencies(run),
            "first_tokens": tables.first_tokens(run),
            "predictions": tables.predictions(run),
            "categories": tables.categories(run, shown, of_shown) if shown is not None else None,
        }
        self.category_point, self.shown = "", shown
        if shown is not None:
            setting = findings.setting_in_words(run, shown)
            self.category_point = f"{setting}, {shown.level_in_words}."
        self.deployment = deployment(run, self.bests)
        self.card = card(run, self.bests, self.deployment)


def _point_for_categories(run: ReportedRun, bests: list[Finding]) -> Point | None:
    """The best point, or the fastest with proposals if no speculation is best."""
    for best in bests:
        if best.point is not None and best.point.is_ok and not best.point.is_baseline:
            return best.point
    known = [p for p in run.points if not p.is_baseline and p.speedup is not None]
    return max(reversed(known), key=lambda p: p.speedup or 0.0, default=None)


def _setup(run: ReportedRun) -> str:
    """The setup of a run in one line."""
    parts = [f"target {run.setting('target', 'model') or '?'}"]
    drafts = sorted({p.draft for p in run.points if p.draft is not None})
    named: Any = ", ".join(drafts) or run.setting("draft", "model")
    if named:
        parts.append(f"{'drafts' if len(drafts) > 1 else 'draft'} {named}")
    prompts = {int(n) for p in run.points if (n := p.number("num_prompts")) is not None}
    data = run.setting("data", "path")
    if prompts:
        count = f"{max(prompts)} prompt{'s' if max(prompts) > 1 else ''}"
        parts.append(f"{count}{f' of {data}' if data else ''}")
    if (temperature := run.setting("sampling", "temperature")) is not None:
        parts.append("greedy" if temperature == 0 else f"temperature {temperature}")
    device = run.environment.get("gpu") or run.environment.get("device")
    if device:
        parts.append(f"on {device}, {run.environment.get('dtype', '?')}")
    return " · ".join(parts)
