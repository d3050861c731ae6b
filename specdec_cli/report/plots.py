"""The plots of a report, drawn with matplotlib without a display.

Each is a function from a run to a figure. Text in them is plain, never markup, and colours are
readable on light and on dark paper.
"""

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specdec_cli.errors import SetupError
from specdec_cli.report.findings import Best, Place, baseline_of, draft_labels, place_of, speedup
from specdec_cli.report.folder import Point, Run
from specdec_cli.report.tables import STAGES, Table
from specdec_cli.text import inert, one_line

# Okabe and Ito's colours, told apart by colour-blind readers, those that show on black and white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
# One more than colours, so that a pair comes back only after all have been.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STAGE_COLOURS = {
    "draft": "#e69f00",
    "broadcast": "#cc79a7",
    "verify": "#0072b2",
    "sample": "#009e73",
    "other": "#999999",
}
_INK = "#1b1e24"  # replaced by the page's own colour in SVG
_FAINT = "#8a8f98"
_WIDTHS = {1: 6.4, 2: 8.2, 3: 9.6}  # inches, by panels side by side
_MOST_PANELS = 12
_MOST_CATEGORIES = 24
_STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "text.parse_math": False,
    "svg.fonttype": "none",
    "font.family": "sans-serif",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawn plot. caption: what it shows, for those who cannot see it too. png, svg: empty where
    they were not asked for.
    """

    name: str
    title: str
    caption: str
    png: bytes
    svg: str


def plots(
    run: Run,
    bests: Sequence[Best],
    by_category: Table | None,
    *,
    png: bool = True,
    svg: bool = True,
) -> list[Plot]:
    """Every plot that the run has figures for. Raises `SetupError` without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise SetupError(
            "plots need the package matplotlib", "pip install matplotlib, or leave out html and png"
        ) from None
    drawings: list[tuple[str, str, str, Callable[[Any], bool]]] = [
        (
            "speedup",
            "Speed-up",
            f"Speed-up over plain decoding by {_axis(run)}, with 95 % intervals; rings mark the "
            "best at each batch size.",
            lambda figure: _speedup(figure, run, bests),
        ),
        (
            "acceptance",
            "Acceptance by position",
            "Share of rounds in which the proposal at a position stands: in all rounds (marginal), "
            "and in those whose earlier proposals stood (conditional).",
            lambda figure: _acceptance(figure, run),
        ),
        (
            "rounds",
            "Where a round's time goes",
            f"Mean time of an engine round by {_axis(run)}, split by stage.",
            lambda figure: _rounds(figure, run),
        ),
        (
            "categories",
            "By category",
            "Mean tokens a round by category of prompt, the target's own token included.",
            lambda figure: _categories(figure, by_category),
        ),
        (
            "predictions",
            "Predicted and measured speed-up",
            "Each point's predicted speed-up against the measured one, with its 95 % interval; "
            "the numbers are k. On the line they agree, and the band is 5 %.",
            lambda figure: _predictions(figure, run),
        ),
    ]
    found = []
    with matplotlib.rc_context(_STYLE), _without_talk():
        for name, title, caption, draw in drawings:
            figure = Figure(layout="constrained")
            if draw(figure):
                picture = _png(figure) if png else b""
                found.append(Plot(name, title, caption, picture, _svg(figure, name) if svg else ""))
    return found


@contextmanager
def _without_talk() -> Iterator[None]:
    """No warnings about letters that a font lacks."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _axis(run: Run) -> str:
    return "draft TP" if run.kind == "compare-tp" else "proposal length"


def _x_label(run: Run) -> str:
    return "draft TP (ranks)" if run.kind == "compare-tp" else "proposed tokens a round, k"


def _safe(text: str) -> str:
    return one_line(inert(text))


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()


def _svg(figure: Any, name: str) -> str:
    """The figure as an element for a page: no prolog, its background and ink the page's own."""
    import matplotlib

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    # Ids have to differ between the plots of a page.
    return (
        text.replace(' id="', f' id="{name}-')
        .replace('"#', f'"#{name}-')
        .replace("url(#", f"url(#{name}-")
    )


def _grid(figure: Any, count: int, height: float, columns: int = 3) -> list[Any]:
    """Axes side by side, in rows, sharing their y axis."""
    columns = max(1, min(columns, count, 3))
    rows = -(-count // columns)
    figure.set_size_inches(_WIDTHS[columns], height * rows + 0.5)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    return axes[:count]


def _label(axes: Sequence[Any], x: str, y: str) -> None:
    """Labels on the outer axes of a grid."""
    for index, axis in enumerate(axes):
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel(y)
        columns = axis.get_subplotspec().get_gridspec().ncols
        if index + columns >= len(axes):
            axis.set_xlabel(x)


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    """One legend for all panels, below them, as many entries a row as fit."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if not entries:
        return
    inches = 0.75 + 0.075 * max(map(len, entries))
    fit = max(1, int(figure.get_size_inches()[0] / inches))
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=min(fit, len(entries))
    )


def _placed(run: Run) -> dict[str, dict[str, list[tuple[Place, Point]]]]:
    """Points with a place that are ok, by panel and line."""
    labels = draft_labels(run)
    found: dict[str, dict[str, list[tuple[Place, Point]]]] = {}
    for point in run.points:
        place = place_of(run, point, labels)
        if place is not None and point.is_ok:
            lines = found.setdefault(place.panel, {})
            lines.setdefault(place.series, []).append((place, point))
    return dict(sorted(found.items(), key=lambda item: _first_number(item[0])))


def _first_number(text: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, text))
    return (int(digits) if digits else 0, text)


def _speedup(figure: Any, run: Run, bests: Sequence[Best]) -> bool:
    panels = {
        panel: lines
        for panel, lines in _placed(run).items()
        if any(speedup(run, p) is not None for line in lines.values() for _, p in line)
    }
    if not panels:
        return False
    panels = dict(list(panels.items())[:_MOST_PANELS])
    series = sorted({name for lines in panels.values() for name in lines}, key=_first_number)
    best = {id(b.point.record) for b in bests if b.point is not None}
    axes = _grid(figure, len(panels), 3.1)
    for axis, (panel, lines) in zip(axes, panels.items(), strict=True):
        axis.axhline(1, color=_FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        ticks = set()
        for name, line in sorted(lines.items()):
            known = [(place.x, s, p) for place, p in line if (s := speedup(run, p)) is not None]
            if not known:
                continue
            known.sort(key=lambda item: item[0])
            ticks |= {x for x, _, _ in known}
            style = _style(series.index(name))
            _line(axis, known, _safe(name), style, starts_at_plain=run.kind != "compare-tp")
            for x, y, point in known:
                if id(point.record) in best:
                    axis.plot(x, y, "o", markersize=13, mfc="none", mec=style["color"], mew=1.6)
        _x_ticks(axis, run, ticks if run.kind == "compare-tp" else ticks | {0})
        axis.set_title(_short(_safe(panel)))
        if len(panels) == 1:
            axis.text(
                1, 1, "plain decoding ", color=_FAINT, ha="right", va="bottom", fontsize=8,
                transform=axis.get_yaxis_transform(),
            )  # fmt: skip
    shown = [p for lines in panels.values() for line in lines.values() for _, p in line]
    axes[0].set_ylim(*_span_of(run, shown))
    _label(axes, _x_label(run), "speed-up over k = 0 (×)")
    _legend(figure, axes)
    return True


def _span_of(run: Run, points: Sequence[Point]) -> tuple[float, float]:
    """Limits of the y axis around every speed-up, its interval and plain decoding."""
    reach = [1.0, *(s for p in points if (s := speedup(run, p)) is not None)]
    reach += [end for p in points for end in p.interval("speedup_ci") or ()]
    pad = 0.06 * (max(reach) - min(reach)) + 0.02
    return max(0.0, min(reach) - pad), max(reach) + pad


def _style(index: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
    }


def _line(
    axis: Any,
    known: Sequence[tuple[int, float, Point]],
    name: str,
    style: Mapping[str, Any],
    *,
    starts_at_plain: bool,
) -> None:
    """Speed-ups along x with their intervals, from plain decoding where x is k."""
    start = [(0, 1.0)] if starts_at_plain else []
    xs, ys = zip(*start, *((x, y) for x, y, _ in known), strict=True)
    axis.plot(xs, ys, linewidth=1.5, markersize=4.5, label=name, **style)
    for x, y, point in known:
        if (interval := point.interval("speedup_ci")) is not None:
            reach = [[max(0.0, y - interval[0])], [max(0.0, interval[1] - y)]]
            axis.errorbar(x, y, reach, color=style["color"], capsize=3, linewidth=1.2)


def _x_ticks(axis: Any, run: Run, ticks: set[int]) -> None:
    shown = sorted(ticks)
    if run.kind == "compare-tp":
        axis.set_xscale("log", base=2)
        axis.set_xticks(shown, map(str, shown))
        axis.minorticks_off()
        axis.set_xlim(min(shown) / 1.4, max(shown) * 1.4)
    else:
        step = -(-len(shown) // 12)
        axis.set_xticks(shown[::step])


def _acceptance(figure: Any, run: Run) -> bool:
    """The longest proposals of each line, at the smallest batch size that has them."""
    labels = draft_labels(run)
    longest: dict[str, Point] = {}
    for point in run.points:
        if not point.is_ok or not point.numbers("acceptance_rate_per_pos") or point.is_baseline:
            continue
        name = "all" if run.kind == "compare-tp" else labels[point.draft]
        if name not in longest or (point.k or 0) > (longest[name].k or 0):
            longest[name] = point
    if not longest:
        return False
    (axis,) = _grid(figure, 1, 3.2)
    most = 1
    for index, (name, point) in enumerate(sorted(longest.items())):
        style = _style(index)
        prefix = f"{_safe(name)}, " if len(longest) > 1 else ""
        for key, word, dash in [
            ("acceptance_rate_per_pos", "marginal", "-"),
            ("conditional_acceptance_rate_per_pos", "conditional", "--"),
        ]:
            known = [(i, 100 * r) for i, r in enumerate(point.numbers(key), 1) if r is not None]
            if known:
                xs, ys = zip(*known, strict=True)
                most = max(most, *xs)
                is_hollow = {"mfc": "none"} if dash == "--" else {}
                axis.plot(xs, ys, dash, linewidth=1.5, markersize=4.5, label=prefix + word,
                          **style, **is_hollow)  # fmt: skip
    axis.set_ylim(0, 103)
    axis.set_xticks(range(1, most + 1, -(-most // 16)))
    _label([axis], "position in the draft (1 is proposed first)", "accepted (%)")
    _legend(figure, [axis])
    return True


def _rounds(figure: Any, run: Run) -> bool:
    groups: dict[str, dict[int, Point]] = {}
    for panel, lines in _placed(run).items():
        for name, line in lines.items():
            title = panel if len(lines) == 1 and run.kind != "compare-tp" else f"{name}, {panel}"
            group = {place.x: point for place, point in line}
            base = baseline_of(run, line[0][1])
            groups[title] = {0: base, **group} if base is not None else group
    if not groups:
        groups = {
            f"batch size {p.batch_size}": {0: p} for p in run.points if p.is_ok and p.is_baseline
        }
    groups = {
        title: group
        for title, group in groups.items()
        if any(p.number("round_ms") is not None for p in group.values())
    }
    if not groups:
        return False
    groups = dict(list(groups.items())[:_MOST_PANELS])
    # A row for each panel of the speed-ups, where its lines fit side by side.
    widest = max((len(lines) for lines in _placed(run).values()), default=1)
    axes = _grid(figure, len(groups), 2.7, widest if 1 < widest <= 3 else 3)
    for axis, (title, group) in zip(axes, groups.items(), strict=True):
        xs = sorted(group)
        bottom = [0.0] * len(xs)
        for stage in (*STAGES, "other"):
            heights = [_stage(group[x], stage) for x in xs]
            if any(h > 0 for h in heights):
                axis.bar(range(len(xs)), heights, 0.72, bottom, label=stage,
                         color=_STAGE_COLOURS[stage])  # fmt: skip
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        plain = "none" if run.kind == "compare-tp" else "0"
        axis.set_xticks(range(len(xs)), [plain if x == 0 else str(x) for x in xs])
        axis.set_title(_short(_safe(title)))
    _label(axes, _x_label(run), "time of a round (ms)")
    _legend(figure, axes)
    return True


def _short(title: str) -> str:
    return title if len(title) <= 38 else f"…{title[-37:]}"


def _stage(point: Point, stage: str) -> float:
    """A stage's time in ms; `other` is what the stages leave of the round."""
    if stage != "other":
        return max(0.0, point.number(f"{stage}_ms") or 0.0)
    named = sum(_stage(point, name) for name in STAGES)
    return max(0.0, (point.number("round_ms") or 0.0) - named)


def _categories(figure: Any, table: Table | None) -> bool:
    """tokens a round is the third column of the table."""
    if table is None or len(table.rows) < 2:
        return False
    rows = [row for row in table.rows if isinstance(row[2], float)][:_MOST_CATEGORIES]
    if not rows:
        return False
    (axis,) = _grid(figure, 1, 0.7 + 0.27 * len(rows))
    names = [_short(_safe(str(row[0]))) for row in rows]
    values = [float(row[2] or 0) for row in rows]
    bars = axis.barh(range(len(rows)), values, 0.7, color=_COLOURS[0])
    axis.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, fontsize=8.5)
    axis.set_yticks(range(len(rows)), names)
    axis.invert_yaxis()
    axis.grid(False)
    axis.margins(x=0.1)
    axis.set_xlabel("tokens a round")
    return True


def _predictions(figure: Any, run: Run) -> bool:
    labels = draft_labels(run)
    groups: dict[str, list[tuple[float, float, Point]]] = {}
    for point in run.points:
        predicted, measured = point.number("predicted_speedup"), speedup(run, point)
        if predicted is None or measured is None or point.is_baseline:
            continue
        drafts = {p.draft for p in run.points if not p.is_baseline}
        name = f"batch size {point.batch_size}"
        if len(drafts) > 1:
            name = f"{labels[point.draft]}, {name}"
        groups.setdefault(name, []).append((measured, predicted, point))
    if not groups:
        return False
    (axis,) = _grid(figure, 1, 4.0)
    ends = [v for group in groups.values() for m, p, _ in group for v in (m, p)]
    spans = [p.interval("speedup_ci") for group in groups.values() for _, _, p in group]
    ends += [end for span in spans for end in span or ()]
    pad = 0.05 * (max(ends) - min(ends)) + 0.01
    low, high = min(ends) - pad, max(ends) + pad
    axis.plot([low, high], [low, high], color=_FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
    axis.fill_between(
        [low, high], [0.95 * low, 0.95 * high], [1.05 * low, 1.05 * high],
        color=_FAINT, alpha=0.15, linewidth=0,
    )  # fmt: skip
    for index, (name, group) in enumerate(groups.items()):
        style = _style(index)
        for measured, predicted, point in group:
            if (interval := point.interval("speedup_ci")) is not None:
                reach = [[max(0.0, measured - interval[0])], [max(0.0, interval[1] - measured)]]
                axis.errorbar(
                    measured, predicted, xerr=reach, color=style["color"], linewidth=1, capsize=2
                )
        xs, ys, _ = zip(*group, strict=True)
        axis.plot(xs, ys, linestyle="none", markersize=5.5, label=_safe(name), **style)
        if sum(map(len, groups.values())) <= 20:
            for measured, predicted, point in group:
                axis.annotate(
                    f"{point.k}", (measured, predicted), (4, 5), textcoords="offset points",
                    fontsize=8, color=style["color"],
                )  # fmt: skip
    axis.set_xlim(low, high)
    axis.set_ylim(low, high)
    axis.grid(True, axis="both")
    _label([axis], "measured speed-up (×)", "predicted speed-up (×)")
    _legend(figure, [axis])
    return True
