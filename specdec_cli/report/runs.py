"""Compares several runs side by side: their speeds on the prompts that they share, and the keys of
their recipes and environments that differ.

This module computes the figures; other modules make the tables, write the HTML and draw the plots.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

from specdec_cli.experiment.compare.comparison_records import merge_repeats
from specdec_cli.experiment.folders.conclusions import SpeedRatio
from specdec_cli.experiment.folders.records import Point, Sample, given
from specdec_cli.experiment.load.points import time_ratio
from specdec_cli.experiment.served import in_text
from specdec_cli.experiment.statistics import stats
from specdec_cli.experiment.sweep.gains import figures_of, ratio_figures
from specdec_cli.report.cells import rows_of, span
from specdec_cli.report.findings import (
    best_by_batch_size,
    interval_in_words,
    setting_in_words,
    times,
    warnings,
)
from specdec_cli.report.folder import ReportedRun, intact_records, read_folder
from specdec_cli.text import counted

# Identifies a prompt across runs: its token ids, and its index among the prompts with these ids or,
# if requests arrive at a rate, the number of the request.
Prompt = tuple[tuple[int, ...], int]
_SEED = 0


@dataclass(frozen=True, slots=True)
class Shown:
    """A point of a run to show: plain decoding, or the fastest point of an arm. An arm is one draft
    model or other proposer, measured at several k.

    run: the run's name.
    setting: the point's settings as text.
    samples: the point's samples, by prompt.
    is_best: whether this is the run's fastest point at its batch size, or the one that the run
        recommends at its request rate.
    """

    run: str
    arm: str
    setting: str
    point: Point
    samples: Mapping[Prompt, Sample]
    is_best: bool


class Ratio(SpeedRatio):
    """One point's speed divided by another's, on the prompts that both have. At a request rate, it
    is the inverse ratio of the mean times of the same requests.

    num_diverging: the number of these prompts for which the two output texts differ.
    """

    num_diverging: int

    @property
    def ends_in_words(self) -> str:
        tied = " (tied)" if self.tied else ""
        return f"{span(self.speed_ratio_ci)}{tied}" if self.speed_ratio_ci else self.verdict

    @property
    def texts_in_words(self) -> str:
        count = self.num_diverging
        return f"{count} of {self.num_prompts} differ" if count else "same"


class Compared(NamedTuple):
    """A point and another one with which it is compared. ratio: the ratio of their speeds; None if
    they share no prompts, or if both are the same point."""

    one: Shown
    other: Shown
    ratio: Ratio | None


@dataclass(frozen=True, slots=True)
class SideBySide:
    """The comparison of several runs.

    runs: the runs by their names.
    shown: the points to show, of all runs.
    pairs: for each batch size or rate and each pair of runs, the best point of each run, the faster
        one first.
    differences: the keys of recipes and environments whose values differ, each with one value per
        run.
    by_engine: points of several runs at the same k and batch size, each against the first of them.
        It is empty unless a run was measured on a server.
    """

    runs: Mapping[str, ReportedRun]
    shown: Sequence[Shown]
    pairs: Sequence[Compared]
    differences: Mapping[str, Sequence[str]]
    by_engine: Sequence[Compared]

    @property
    def names(self) -> list[str]:
        return list(self.runs)

    def against_first(self, one: Shown) -> Ratio | None:
        """Divide a point's speed by that of the first run's point with the same arm and batch size.
        If each run has only one arm, the arms may have different names. Return None if there is
        no such point, or if the point belongs to the first run."""
        level = one.point.level
        same = [s for s in self.shown if s.run == self.names[0] and s.point.level == level]
        same = [s for s in same if s.point.is_baseline == one.point.is_baseline]
        named = [s for s in same if s.arm == one.arm]
        if not named and self._has_one_arm(one.run) and self._has_one_arm(self.names[0]):
            named = same
        return ratio_of(one, named[0]) if named and one.run != self.names[0] else None

    def _has_one_arm(self, run: str) -> bool:
        arms = {s.arm for s in self.shown if s.run == run and not s.point.is_baseline}
        return len(arms) == 1

    def _draft_of(self, one: Shown) -> str | None:
        """Return the name of a point's draft. Points of a comparison name none, so it is that of
        their run."""
        run, point = self.runs[one.run], one.point
        if run.is_comparison and not point.is_baseline:
            return next(iter(run.drafts), None)
        return point.draft

    def _arm(self, one: Shown) -> dict[str, Any]:
        degrees = given(target_tp=one.point.target_tp, draft_tp=one.point.draft_tp)
        return {"run": one.run, "draft": self._draft_of(one), "k": one.point.k, **degrees}

    @property
    def answers(self) -> list[str]:
        """One sentence for each pair of runs at each batch size. It says which run is faster, or
        that the runs have no prompt in common. Then one for each inconclusive verdict of a run."""
        found = [] if self.pairs else ["No two runs have a point to compare."]
        for one, other, ratio in self.pairs:
            at = one.point.at_level
            names = f"{one.run} ({one.setting})", f"{other.run} ({other.setting})"
            is_load = one.point.load is not None
            what = "request" if is_load else "prompt"
            if ratio is None:
                alike = f"{what} with the same arrivals" if is_load else what
                found.append(f"{' and '.join(names)} have no {alike} in common {at}.")
                continue
            by = "by the mean time of a request " if is_load else ""
            over = f"{by}over {counted(ratio.num_prompts, f'common {what}')} {at}"
            value, ends = times(ratio.speed_ratio or 0.0), ratio.speed_ratio_ci
            gain = f"{value} as fast as {names[1]} {over}"
            if ends is None:
                found.append(f"{names[0]} is measured {gain}: {ratio.verdict}.")
            elif ratio.tied:
                told = f"are tied {over} ({value}, {ends[0]:.2f} to {ends[1]:.2f})"
                found.append(f"{' and '.join(names)} {told}.")
            else:
                found.append(f"{names[0]} is {gain}{interval_in_words(ends)}.")
        found += [
            f"{name} does not show whether speculation helps {best.at.at_level}: its "
            "verdict is inconclusive."
            for name, run in self.runs.items()
            for best in best_by_batch_size(run)
            if best.is_open
        ]
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document's `runs`, `points`, `comparisons`, `engines` and `differences`.

        In `engines`, `mean_acceptance_length` covers only the prompts that all points at the same
        k and batch size share, and does not count proposals past the end of a text.
        """
        points = [
            {
                "run": one.run,
                "draft": self._draft_of(one),
                **{name: getattr(one.point, name) for name in ("target_tp", "draft_tp", "k")},
                **_level_fields(one.point),
                "is_best": one.is_best,
                "num_prompts": len(one.samples),
                "decode_tokens_per_second": one.point.speed,
                **given(e2el_ms=mean_time(one.point)),
                "speedup": one.point.speedup,
                "speedup_ci": one.point.speedup_ci,
                "against_first": ratio.as_dict() if ratio is not None else None,
            }
            for one in self.shown
            for ratio in [self.against_first(one)]
        ]
        pairs = [
            {
                **_level_fields(one.point),
                "arm": self._arm(one),
                "against": self._arm(other),
                **(ratio.as_dict() if ratio is not None else {"num_prompts": 0}),
            }
            for one, other, ratio in self.pairs
        ]
        engines = [
            {
                "run": one.run,
                "engine": one.point.engine.model_dump() if one.point.engine is not None else None,
                **_level_fields(one.point),
                "draft": one.point.draft,
                "k": one.point.k,
                "num_prompts": len(one.samples),
                "mean_acceptance_length": length_in_text(one),
                "decode_tokens_per_second": one.point.speed,
                "decode_tokens_per_second_ci": one.point.decode_tokens_per_second_ci,
                "round_ms": one.point.number("round_ms"),
                "round_ms_ci": one.point.round_ms_ci,
                "against_first": ratio.as_dict() if ratio is not None else None,
            }
            for one, _, ratio in self.by_engine
        ]
        return {
            "runs": [{"name": name, "folder": str(run.path)} for name, run in self.runs.items()],
            "points": points,
            "comparisons": pairs,
            "engines": engines,
            "differences": {key: list(values) for key, values in self.differences.items()},
        }

    @property
    def headline(self) -> str:
        """The first answer, which is about the fastest run."""
        return self.answers[0]

    @property
    def has_rates(self) -> bool:
        """True if requests arrived at a rate in any of the runs."""
        return any(one.point.load is not None for one in self.shown)


def side_by_side(folders: Sequence[Path]) -> SideBySide:
    """Read and compare the runs in several folders. Raises the errors of `read_folder`."""
    found = [read_folder(folder) for folder in folders]
    runs = dict(zip(_names(folders), found, strict=True))
    shown = [one for name, run in runs.items() for one in _shown(name, run)]
    bests = [one for one in shown if one.is_best]
    pairs = []
    for level in sorted({one.point.level for one in bests}):
        ranked = [one for one in bests if one.point.level == level]
        ranked.sort(key=lambda one: -_worth(one.point))
        pairs += [Compared(*two, ratio_of(*two)) for two in combinations(ranked, 2)]
    return SideBySide(runs, shown, pairs, _differing(runs.values()), _by_engine(runs))


def _by_engine(runs: Mapping[str, ReportedRun]) -> list[Compared]:
    """Compare the points that different runs have at the same batch size (or request rate) and k.

    Points at the same setting form a group. Groups with points of only one run, and groups without
    a point from a server, are left out. Only the samples of prompts that the whole group shares are
    kept. Each point is compared with the group's first point.
    """
    found: dict[tuple[tuple[float, int], int], list[Shown]] = defaultdict(list)
    for name, run in runs.items():
        samples = _samples(run)
        for p in run.points:
            if _is_valid(p) and (of := samples.get(_place(p))) is not None:
                setting = setting_in_words(run, p)
                found[p.level, p.k].append(Shown(name, "", setting, p, of, False))
    rows = []
    for _, group in sorted(found.items()):
        if len({one.run for one in group}) > 1 and any(one.point.engine for one in group):
            common = set.intersection(*(set(one.samples) for one in group))
            group = [replace(one, samples={p: one.samples[p] for p in common}) for one in group]
            first, *others = group
            rows.append(Compared(first, first, None))
            rows += [Compared(one, first, ratio_of(one, first)) for one in others]
    return rows


def warnings_of(whole: SideBySide) -> list[str]:
    """Return the warnings of all runs, each prefixed with the run's name."""
    return [
        f"{name}: {notice.message}" for name, run in whole.runs.items() for notice in warnings(run)
    ]


def ratio_of(one: Shown, other: Shown) -> Ratio | None:
    """Compute the ratio of two points' speeds over the prompts that both have. At a request rate,
    this is the inverse ratio of the mean times of the same requests, of those whose time is known.
    Return None if they have nothing in common."""
    common = sorted(one.samples.keys() & other.samples.keys())
    loads = [load for p in (one.point, other.point) if (load := p.load) is not None]
    if loads:
        common = [p for p in common if one.samples[p].e2el_ms and other.samples[p].e2el_ms]
    if not common or len({(load.arrivals, load.seed) for load in loads}) > 1:
        return None
    if loads:
        common.sort(key=lambda prompt: prompt[1])  # blocks of an interval are in order of arrival
    ours, theirs = ([of[p] for p in common] for of in (one.samples, other.samples))
    if loads:
        value, ends = time_ratio(theirs, ours, max(load.crowding for load in loads))
        figures = ratio_figures(value, ends)
    else:
        found = stats.measured_speed(ours).over(stats.measured_speed(theirs))
        figures = figures_of(found, _SEED)
    pairs = zip(ours, theirs, strict=True)
    # Compare only up to the end of the shorter text, since the runs may have different limits.
    parted = (any(map(ne, a.token_ids, b.token_ids)) for a, b in pairs)
    return Ratio(num_prompts=len(common), **figures, num_diverging=sum(parted))


def _names(folders: Sequence[Path]) -> list[str]:
    """Name the runs after their folders, or after the folders' paths if names are not unique."""
    short = [folder.resolve().name for folder in folders]
    paths = [str(folder) for folder in folders]
    names = [s if short.count(s) == 1 else p for s, p in zip(short, paths, strict=True)]
    return [n if names.count(n) == 1 else f"{n} ({i})" for i, n in enumerate(names, start=1)]


def _shown(name: str, run: ReportedRun) -> list[Shown]:
    """Return, for each batch size, the points of plain decoding and of each arm's fastest k. At a
    request rate, the arm of the point that the run recommends is represented by that point."""
    samples = _samples(run)
    advised = {one.at.level: one.point for one in best_by_batch_size(run)}

    def rank(point: Point) -> tuple[bool, float]:
        return point.load is not None and point is advised[point.level], _worth(point)

    found = []
    for level in sorted({p.level for p in run.points}):
        arms: dict[str, Point] = {}
        for point in run.points:
            if point.level != level or not _is_valid(point) or _place(point) not in samples:
                continue
            arm = "plain decoding" if point.is_baseline else run.labels[point.draft]
            if arm not in arms or rank(point) > rank(arms[arm]):
                arms[arm] = point
        best = max(arms.values(), key=_worth, default=None)
        if best is not None and best.load is not None:
            best = advised[level]
        found += [
            Shown(name, arm, setting_in_words(run, p), p, samples[_place(p)], p is best)
            for arm, p in arms.items()
        ]
    return found


def _is_valid(point: Point) -> bool:
    """Return whether a point was measured, its speed-up is credible and it was not overloaded. A
    speed-up larger than speculation can reach shows that something disturbed the run."""
    is_slow = point.load is not None and point.load.overloaded
    return point.is_ok and point.impossible_speedup is None and not is_slow


def _place(point: Point | Sample) -> tuple[Any, ...]:
    # Plain decoding does not depend on the draft TP, so the samples from all draft TPs at one
    # target TP form one point.
    draft_tp = None if point.k == 0 else point.draft_tp
    # The draft is left out of the key for plain decoding, which uses no draft, and in a comparison
    # of TP degrees, where all points have the same draft.
    draft = point.draft if point.k and point.target_tp is None else None
    return (draft, point.target_tp, draft_tp, point.batch_size, point.request_rate, point.k)


def _level_fields(point: Point) -> dict[str, Any]:
    return {"batch_size": point.batch_size or None, **given(request_rate=point.request_rate)}


def mean_time(point: Point) -> float | None:
    """Return the mean time of a request in milliseconds; None without a request rate."""
    return point.number("e2el_ms", "mean") if point.load is not None else None


def _worth(point: Point) -> float:
    """Return the figure by which points are ranked: tokens/s or, at a request rate, the inverse of
    the mean time of a request."""
    if point.load is None:
        return point.speed
    return 1.0 / found if (found := mean_time(point)) else 0.0


def _samples(run: ReportedRun) -> dict[tuple[Any, ...], dict[Prompt, Sample]]:
    """Read the samples of a run, and group them by point and then by prompt. Samples of prompts
    that could not run are left out. In a comparison of TP degrees, all pairs with the same target
    TP measure plain decoding, so their samples of a prompt are merged as repeats."""
    found: dict[tuple[Any, ...], dict[Prompt, Sample]] = defaultdict(dict)
    indices: dict[tuple[Any, ...], dict[tuple[int, ...], list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for sample in intact_records(run.path / "samples.jsonl", Sample, []):
        if not sample.could_run:
            continue
        ids, place = tuple(sample.prompt_token_ids), _place(sample)
        number = sample.request
        if number is None:
            known = indices[place][ids]
            if sample.index not in known:
                known.append(sample.index)
            number = known.index(sample.index)
        held = found[place].setdefault((ids, number), sample)
        if sample.draft_tp != held.draft_tp:
            found[place][ids, number] = merge_repeats([{0: held}, {0: sample}])[0]
    return found


def _differing(runs: Collection[ReportedRun]) -> dict[str, list[str]]:
    """Find the keys of recipes and environments that differ, with each run's value. A section that
    is null in some of the runs has only the rows of its keys."""
    whole = []
    for run in runs:
        found = dict(rows_of(run.recipe))
        found |= {f"environment.{key}": value for key, value in rows_of(run.environment)}
        found["drafts"] = ", ".join(run.drafts)
        whole.append(found)
    keys = sorted({key for found in whole for key in found})
    sections = {key.rpartition(".")[0] for key in keys}
    rows = {key: [found.get(key, "–") for found in whole] for key in keys if key not in sections}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def length_in_text(one: Shown) -> float | None:
    """Return the mean acceptance length over a point's samples, or None if it is not known.

    A server may propose tokens past the end of a text. Such proposals are not counted, because our
    own engine does not count them either.
    """
    if one.point.is_baseline:
        return one.point.number("mean_acceptance_length")
    counted = in_text(one.samples.values())
    return counted.mean_acceptance_length if counted is not None else None
