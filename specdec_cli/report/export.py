"""A report for other programs: CSV and LaTeX tables, markdown for notes and pull requests."""

import csv
import io
import json
import re
import unicodedata
from collections.abc import Sequence

from specdec_cli.report.cells import Table, Value, is_text
from specdec_cli.report.content import Content
from specdec_cli.report.folder import ReportedRun
from specdec_cli.report.page import SECTIONS
from specdec_cli.report.plots import Plot
from specdec_cli.report.raw_tables import (
    raw_acceptance,
    raw_categories,
    raw_comparisons,
    raw_points,
)
from specdec_cli.report.runs import SideBySide
from specdec_cli.text import inert, one_line

# Characters that begin a formula in spreadsheets.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_MARKUP = re.compile(r"([\\`*_\[\]|<>~$&]|^[-+#=](?![\d.]))")


def csv_tables(run: ReportedRun) -> dict[str, str]:
    """CSV files by name: points.csv, and those of acceptance, categories and comparisons that have
    rows."""
    found = [raw_points(run), raw_acceptance(run), raw_categories(run), raw_comparisons(run)]
    return {f"{table.name}.csv": csv_of(table) for table in found if table.rows}


_TEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "–": "--", "×": r"$\times$", "…": r"\ldots{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}  # fmt: skip


def latex_tables(content: Content) -> dict[str, str]:
    """LaTeX files by name, each with a `tabular` for a document that loads booktabs."""
    found = content.tables.items()
    return {f"{name}.tex": latex_of(table) for name, table in found if table and table.rows}


def latex_of(table: Table) -> str:
    """A table as a `tabular`."""
    titles = [f"{c.title} ({c.unit})" if c.unit else c.title for c in table.columns]
    sides = ["l" if is_text(table, place) else "r" for place in range(len(titles))]
    rows = [" & ".join(map(_tex, table.shown(row))) for row in table.rows]
    head = " & ".join(map(_tex, titles))
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
    """Text escaped for LaTeX, on one line."""
    return "".join(_TEX.get(sign, sign) for sign in one_line(inert(text)))


def csv_of(table: Table) -> str:
    """A table as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([_cell(column.title) for column in table.columns])
    writer.writerows([_cell(value) for value in row] for row in table.rows)
    return buffer.getvalue()


def _cell(value: Value) -> str:
    """A cell as text; an apostrophe precedes what a spreadsheet would run as a formula."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return repr(value)
    text = inert(value)
    # Spreadsheets read full-width signs as plain ones, and skip blanks before them.
    plain = unicodedata.normalize("NFKC", text)
    is_formula = plain.startswith(_FORMULA) or plain.lstrip().startswith(_FORMULA)
    return f"'{text}" if is_formula else text


def markdown(content: Content, plots: Sequence[Plot], folder: str) -> str:
    """The report as markdown. folder: of its pictures, relative to it."""
    lines = [f"# {_plain(content.title)}", "", f"**{_plain(content.headline)}**", ""]
    lines += [f"> - {_plain(warning)}" for warning in content.warnings]
    lines.append("")
    for title, told in content.card:
        is_command = title in ("vLLM", "SGLang") and "`" not in told and told.isprintable()
        shown = f"`{told}`" if is_command else _plain(told)  # as it is, to be copied
        lines.append(f"- {title}: {shown}")
    if content.lossless is not None:
        lines += ["", _plain(content.lossless)]
    if len(content.answers) > 1:
        lines += ["", *(f"- {_plain(one)}" for one in content.answers)]
    lines += [*(f"\n{_plain(one)}" for one in content.reasons), "", _plain(content.setup), ""]
    pictures = {plot.name: plot for plot in plots}
    for _, picture, name in SECTIONS:
        table = content.tables.get(name)
        if table is None or not table.rows or name == "category_pairs":  # which is long
            continue
        lines += [f"## {table.title}", ""]
        if name == "categories":
            lines += [_plain(content.category_point), ""]
        if picture in pictures:
            lines += [_picture(pictures.pop(picture), folder), ""]
        lines += [*_markdown_table(table), ""]
    for plot in pictures.values():
        lines += [f"## {plot.title}", "", _picture(plot, folder), ""]
    if content.deployment is not None:
        lines += ["## In vLLM", "", *_fenced(content.deployment.command, "sh"), ""]
        if content.deployment.sglang_command is not None:
            lines += ["In SGLang:", "", *_fenced(content.deployment.sglang_command, "sh"), ""]
        if content.deployment.speculative_config is not None:
            lines += [
                *_fenced(json.dumps(content.deployment.speculative_config, indent=2), "json"),
                "",
            ]
        lines += [f"- {_plain(note)}" for note in content.deployment.notes]
    return "\n".join(lines).rstrip() + "\n"


def aligned(table: Table) -> list[str]:
    """A table as lines of text, columns aligned."""
    titles = [one_line(f"{c.title} ({c.unit})" if c.unit else c.title) for c in table.columns]
    rows = [titles, *([one_line(cell) for cell in table.shown(row)] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = [is_text(table, place) for place in range(len(titles))]
    found = [f"{one_line(table.title)}:"]
    for row in rows:
        cells = zip(row, widths, left, strict=True)
        line = "  ".join(c.ljust(w) if to_left else c.rjust(w) for c, w, to_left in cells)
        found.append(line.rstrip())
    return found


def runs_markdown(whole: SideBySide, warnings: Sequence[str]) -> str:
    """A report on several runs as markdown."""
    lines = [f"# {_plain(', '.join(whole.names))}", ""]
    lines += [f"**{_plain(one)}**" + "\n" for one in whole.answers]
    lines += [f"> {_plain(one)}" for one in warnings]
    for table in whole.tables:
        lines += ["", f"## {_plain(table.title)}", "", *_markdown_table(table)]
    return "\n".join(lines).rstrip() + "\n"


def _picture(plot: Plot, folder: str) -> str:
    return f"![{_plain(plot.caption)}]({folder}{plot.name}.png)"


def _markdown_table(table: Table) -> list[str]:
    titles = [f"{c.title} ({c.unit})" if c.unit else c.title for c in table.columns]
    rows = [f"| {' | '.join(map(_plain, titles))} |", f"|{'---|' * len(titles)}"]
    return rows + [f"| {' | '.join(map(_plain, table.shown(row)))} |" for row in table.rows]


def _plain(text: str) -> str:
    """Text escaped for markdown, on one line, with nothing invisible in it."""
    line = "".join(one_line(text[i : i + 80]) for i in range(0, len(text), 80))
    return _MARKUP.sub(r"\\\1", line)


def _fenced(text: str, language: str) -> list[str]:
    """A block of code that nothing in it can end."""
    inner = inert(text)
    longest = max((len(run) for run in re.findall(r"`+", inner)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", inner, fence]
