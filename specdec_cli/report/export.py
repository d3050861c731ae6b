"""Writes reports for other programs: CSV tables with field names and unrounded figures, LaTeX
tables, and markdown for notes and pull requests."""

import csv
import io
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence

from specdec_cli.core.figures import STAGES, TTFT_PARTS
from specdec_cli.experiment.folders.conclusions import SpeedRatio
from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.cells import PERCENTILES, Column, Table, Value, first_token_part, is_text
from specdec_cli.report.content import Content
from specdec_cli.report.folder import ReportedRun
from specdec_cli.report.page import parts
from specdec_cli.report.plots import Plot
from specdec_cli.report.run_tables import run_tables
from specdec_cli.report.runs import SideBySide
from specdec_cli.report.tables import counts_experts
from specdec_cli.text import inert, one_line

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


def _setting(run: ReportedRun, point: Point, names: Sequence[str] = _SETTING) -> dict[str, Value]:
    """Return the columns that identify a point: its request rate if the run has rates, then the
    fields `names`. The batch size is None if the number of concurrent requests has no limit, as in
    JSON."""
    rate = {"request_rate": point.request_rate} if _has_rates(run) else {}
    found = {name: getattr(point, name) for name in names}
    return rate | found | {"batch_size": point.batch_size or None}


def _has_rates(run: ReportedRun) -> bool:
    return any(point.request_rate is not None for point in run.points)


def _ends(of: str, found: object, prefix: str = "") -> dict[str, Value]:
    """Return the ends of a figure's interval as the columns NAME_lo and NAME_hi, which are None
    if there is no interval. of: the figure's name. prefix: added before the columns' names."""
    ends = getattr(found, f"{of}_ci", None) or (None, None)
    return {f"{prefix}{of}_{end}": value for end, value in zip(("lo", "hi"), ends, strict=True)}


def raw_points(run: ReportedRun) -> Table:
    """Make a table with a row for each point, with all its figures."""
    setting: tuple[str, ...] = ("draft", "k", "batch_size")
    names = (*_FIGURES, *(["distinct_experts"] if counts_experts(run) else ()))
    if run.is_comparison:
        setting = ("target_tp", "draft_tp", "batch_size", "k")
        names = (*names, "num_blocks", "speedup_vs_equal_tp")
    parts = [n for n in TTFT_PARTS if any(first_token_part(n, p) is not None for p in run.points)]

    def row(point: Point) -> dict[str, Value]:
        even = point.break_even
        return (
            _setting(run, point, setting)
            | {name: getattr(point, name) for name in ("status", "reason", "speedup")}
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
            | {f"ttft_{name}_ms": first_token_part(name, point) for name in parts}
            | (_of_load(point) if _has_rates(run) else {})
        )

    return _table("points", [row(point) for point in run.points])


def _of_load(point: Point) -> dict[str, Value]:
    """Return the columns about load. They are empty for a point without a request rate."""
    load = point.load
    found = {name: getattr(load, name, None) for name in _LOAD}
    found |= _ends("slo_attainment", load) | _ends("goodput", load)
    late = load.send_lag_ms if load is not None else None
    for part in ("mean", *PERCENTILES):
        found[f"e2el_{part}_ms"] = point.number("e2el_ms", part)
        found[f"send_lag_{part}_ms"] = getattr(late, part, None)
    return found


def _table(name: str, rows: Sequence[Mapping[str, Value]]) -> Table:
    """Make a table of rows that all have the same columns."""
    columns = tuple(Column(title) for title in (rows[0] if rows else ()))
    return Table(name, "", columns, tuple(tuple(row.values()) for row in rows))


def raw_comparisons(run: ReportedRun) -> Table:
    """Make a table that compares pairs of arms; an arm is a draft at one k, or plain decoding. Each
    pair has a row for all prompts, followed by a row for each category of prompts."""
    rows: list[dict[str, Value]] = []
    for one in run.summary.comparisons:
        setting = {
            "batch_size": one.batch_size,
            **{"draft": one.arm.draft, "k": one.arm.k},
            **{"against_draft": one.against.draft, "against_k": one.against.k},
        }
        parts: list[tuple[str | None, SpeedRatio]] = [(None, one)]
        for name, part in (*parts, *one.per_category.items()):
            figures = {"num_prompts": part.num_prompts, "speed_ratio": part.speed_ratio}
            rows.append(setting | {"category": name} | figures | _ends("speed_ratio", part))
    return _table("comparisons", rows)


def raw_acceptance(run: ReportedRun) -> Table:
    """Make a table of acceptance rates, with a row for each position of a proposal at each point.
    Points whose acceptance rates are unknown have no rows."""
    rows = []
    for point in run.points:
        rates = ("acceptance_rate", "conditional_acceptance_rate")
        known = (getattr(point.metrics, f"{rate}_per_pos", None) or () for rate in rates)
        for position, pair in enumerate(zip(*known, strict=True), start=1):
            rows.append(
                _setting(run, point) | {"position": position} | dict(zip(rates, pair, strict=True))
            )
    return _table("acceptance", rows)


def raw_categories(run: ReportedRun) -> Table:
    """Make a table with a row for each category of prompts at each point."""
    names = ("num_prompts", "mean_acceptance_length", "draft_acceptance_rate", "speedup")
    rows = [
        _setting(run, point)
        | {"category": category}
        | {name: getattr(row, name) for name in (*names, "decode_tokens_per_second")}
        | _ends("speedup", row)
        | _ends("mean_acceptance_length", row)
        for point in run.points
        for category, row in point.per_category.items()
    ]
    return _table("categories", rows)


# Characters that begin a formula in spreadsheets.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_MARKUP = re.compile(r"([\\`*_\[\]|<>~$&]|^[-+#=](?![\d.]))")


def csv_tables(run: ReportedRun) -> dict[str, str]:
    """Return the contents of CSV files by name: points.csv, acceptance.csv, categories.csv and
    comparisons.csv, without those that would have no rows."""
    found = [raw_points(run), raw_acceptance(run), raw_categories(run), raw_comparisons(run)]
    return {f"{table.name}.csv": csv_of(table) for table in found if table.rows}


_TEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "–": "--", "×": r"$\times$", "…": r"\ldots{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}  # fmt: skip


def latex_tables(content: Content) -> dict[str, str]:
    """Return LaTeX files by name, each with a `tabular` for a document that loads booktabs."""
    return {f"{name}.tex": latex_of(table) for name, table in content.tables.items() if table.rows}


def latex_of(table: Table) -> str:
    """Write a table as a LaTeX `tabular`."""
    sides = ["l" if is_text(table, place) else "r" for place in range(len(table.columns))]
    rows = [" & ".join(map(_tex, table.shown(row))) for row in table.rows]
    head = " & ".join(map(_tex, table.titles))
    return "\n".join(
        [
            f"% {one_line(table.title)}; needs \\usepackage{{booktabs}}",
            f"\\begin{{tabular}}{{{''.join(sides)}}}",
            "\\toprule",
            f"{head} \\\\",
            "\\midrule",
            *(f"{row} \\\\" for row in rows),
            "\\bottomrule",
            "\\end{tabular}",
            "",
        ]
    )


def _tex(text: str) -> str:
    """Escape text for LaTeX, on one line."""
    return "".join(_TEX.get(sign, sign) for sign in one_line(inert(text)))


def csv_of(table: Table) -> str:
    """Write a table as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([_cell(column.title) for column in table.columns])
    writer.writerows([_cell(value) for value in row] for row in table.rows)
    return buffer.getvalue()


def _cell(value: Value) -> str:
    """Write a cell as text, with an apostrophe before text that a spreadsheet would run as a
    formula."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return repr(value)
    text = inert(value)
    # Spreadsheets treat full-width characters, such as a full-width =, like ordinary ones, and skip
    # blanks at the start of a cell.
    plain = unicodedata.normalize("NFKC", text)
    is_formula = plain.startswith(_FORMULA) or plain.lstrip().startswith(_FORMULA)
    return f"'{text}" if is_formula else text


def markdown(content: Content, plots: Sequence[Plot], folder: str) -> str:
    """Write the report as markdown. folder: the folder of its pictures, relative to the report."""
    lines = [f"# {_plain(content.title)}", "", f"**{_plain(content.headline)}**", ""]
    lines += [f"> - {_plain(warning)}" for warning in content.warnings]
    lines.append("")
    for title, told in content.card:
        is_command = title in ("vLLM", "SGLang") and "`" not in told and told.isprintable()
        shown = f"`{told}`" if is_command else _plain(told)  # not escaped, so that it can be copied
        lines.append(f"- {title}: {shown}")
    if content.lossless is not None:
        lines += ["", _plain(content.lossless)]
    if len(content.answers) > 1:
        lines += ["", *(f"- {_plain(one)}" for one in content.answers)]
    lines += [*(f"\n{_plain(one)}" for one in content.reasons), "", _plain(content.setup), ""]
    pictures = {plot.name: plot for plot in plots}
    for part in parts(content, plots):
        table = part.table
        if table is not None and table.name == "category_pairs":  # too long for markdown
            continue
        lines += [f"## {part.title if table is None else table.title}", ""]
        if table is not None and table.name == "categories":
            lines += [_plain(content.category_point), ""]
        if (plot := pictures.get(part.picture)) is not None:
            lines += [f"![{_plain(plot.caption)}]({folder}{plot.name}.png)", ""]
        lines += [*_markdown_table(table), ""] if table is not None else []
    if (found := content.deployment) is not None:
        lines += ["## In vLLM", "", *_fenced(found.command, "sh")]
        if found.sglang_command is not None:
            lines += ["In SGLang:", "", *_fenced(found.sglang_command, "sh")]
        if found.speculative_config is not None:
            lines += _fenced(json.dumps(found.speculative_config, indent=2), "json")
        lines += [f"- {_plain(note)}" for note in found.notes]
    return "\n".join(lines).rstrip() + "\n"


def aligned(table: Table) -> list[str]:
    """Write a table as lines of text with aligned columns."""
    shown = (table.titles, *map(table.shown, table.rows))
    rows = [[one_line(cell) for cell in row] for row in shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = [is_text(table, place) for place in range(len(table.columns))]
    found = [f"{one_line(table.title)}:"]
    for row in rows:
        cells = zip(row, widths, left, strict=True)
        line = "  ".join(c.ljust(w) if to_left else c.rjust(w) for c, w, to_left in cells)
        found.append(line.rstrip())
    return found


def runs_markdown(whole: SideBySide, warnings: Sequence[str]) -> str:
    """Write a report on several runs as markdown."""
    lines = [f"# {_plain(', '.join(whole.names))}", ""]
    lines += [f"**{_plain(one)}**" + "\n" for one in whole.answers]
    lines += [f"> {_plain(one)}" for one in warnings]
    for table in run_tables(whole):
        lines += ["", f"## {_plain(table.title)}", "", *_markdown_table(table)]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(table: Table) -> list[str]:
    head, *rows = (
        f"| {' | '.join(map(_plain, row))} |"
        for row in (table.titles, *map(table.shown, table.rows))
    )
    return [head, f"|{'---|' * len(table.columns)}", *rows]


def _plain(text: str) -> str:
    """Escape text for one line of markdown. Characters that are not printable are escaped too."""
    line = "".join(one_line(text[i : i + 80]) for i in range(0, len(text), 80))
    return _MARKUP.sub(r"\\\1", line)


def _fenced(text: str, language: str) -> list[str]:
    """Return the lines of a code block whose fence is longer than any fence inside it."""
    inner = inert(text)
    longest = max((len(run) for run in re.findall(r"`+", inner)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", inner, fence, ""]
