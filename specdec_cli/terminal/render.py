"""Rendering for terminals: text on stdout, tables and progress on stderr.

Text of prompts and models is never interpreted as markup, and control characters are escaped, so
that a model's output cannot control the terminal.
"""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

from specdec_cli.core.figures import TTFT_PARTS, Metrics, stages_in
from specdec_cli.experiment.statistics.stats import among_rounds
from specdec_cli.terminal.progress import can_redraw
from specdec_cli.text import counted

_WORD = 20  # terminal columns: enough for most words, so a wrapped column needs no more
_WIDE = 1000  # terminal columns: output to a file is this wide, so that no row is folded
_NO_LIMIT = 100_000  # terminal columns: so wide that no table is wrapped while it is measured
_NO_PROPOSALS = "no round had a proposal"
ACCEPTED, PROMPT, HEADING = Style(color="green"), Style(dim=True), Style(bold=True)


def console(stream: TextIO) -> Console:
    """Make a console without markup, highlighting or emoji."""
    return Console(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=True)


def console_of_results() -> Console:
    """Make the console on stdout. If stdout is not a terminal, the console is wide enough for any
    table."""
    out = console(sys.stdout)
    if not sys.stdout.isatty():
        out.width = _WIDE
    return out


def table_within(
    width: int,
    columns: Mapping[str, Sequence[str]],
    *,
    spare: Sequence[str] = (),
    names: Sequence[str] = (),
    long: Sequence[str] = (),
) -> Table:
    """Make a table that fits into `width` if enough columns can be left out.

    columns: the cells of each column, by heading.
    spare: the headings of columns that may be left out, in the order in which to leave them out.
    names: the headings of columns that are left-aligned and whose cells are folded, not cut.
    long: the headings of columns whose cells may take several lines.
    """
    shown = dict(columns)
    for heading in spare:
        if least_width(shown, {*names, *long}) <= width:
            break
        shown.pop(heading, None)
    table = plain_table()
    for heading in shown:
        if heading in names:
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(heading, justify="right", no_wrap=heading not in long)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*map(Text, row))
    return table


def plain_table(*headings: str, no_wrap: bool = False, show_header: bool = True) -> Table:
    """Make a table without borders, with right-aligned columns."""
    table = Table(box=None, pad_edge=False, show_header=show_header)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=no_wrap)
    return table


def least_width(columns: Mapping[str, Sequence[str]], wrapped: Collection[str]) -> int:
    """Return the smallest width at which nothing is cut. A column in `wrapped` needs only enough
    room for a word."""
    widths = {name: max(map(cell_len, (name, *cells))) for name, cells in columns.items()}
    for name in widths.keys() & wrapped:
        widths[name] = min(widths[name], max(cell_len(name), _WORD))
    return sum(widths.values()) + 2 * (len(widths) - 1)


def table_width(table: Table) -> Measurement:
    """Measure a table's width: the minimum, with all cells folded, and the maximum, with none
    folded."""
    out = console(sys.stdout)
    return Measurement.get(out, out.options.update(width=_NO_LIMIT), table)


def has_colour(stream: TextIO) -> bool:
    """Return whether `stream` shows colours. NO_COLOR turns colours off."""
    out = console(stream)
    return out.color_system is not None and not out.no_color


def progress_bar() -> Progress:
    """Make a progress bar over prompts, on stderr. It draws nothing if stderr cannot redraw. It can
    also be part of a `live_view`, which then draws it."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console(sys.stderr),
        transient=True,
        redirect_stdout=False,  # otherwise rich would send what is printed on stdout to stderr
        disable=not can_redraw(),
    )


def live_view(render: Callable[[], RenderableType]) -> Live:
    """Show on stderr, during the `with` block, what `render` returns. Redraw it twice a second."""
    return Live(
        console=console(sys.stderr),
        transient=True,
        redirect_stdout=False,  # for the same reason as in `progress_bar`
        get_renderable=render,
        refresh_per_second=2,
    )


def summary_table(
    metrics: Metrics,
    baseline: Metrics | None,
    *,
    tinted: bool,
    remarks: Sequence[str] = (),
) -> Table:
    """Make a small table of acceptance and times.

    baseline: the metrics at k = 0, to compare with; None if k = 0 was not measured.
    tinted: whether accepted tokens are tinted in the text printed above. If so, the table explains
        the colour.
    remarks: notes on the text and the figures.
    """
    table = plain_table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    table.add_row(
        "tokens", str(metrics.num_output_tokens), f"from {counted(metrics.num_prompts, 'prompt')}"
    )
    table.add_row(
        "speed",
        f"{metrics.decode_tokens_per_second:.1f}",
        "tokens/s decoding"
        + (f" ({baseline.decode_tokens_per_second:.1f} without a draft)" if baseline else ""),
    )
    if metrics.num_drafts:
        rate = f"{100 * (metrics.draft_acceptance_rate or 0):.0f}%"
        what = Text(f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} proposed")
        if tinted:
            what.append(", in this colour", ACCEPTED)
        table.add_row("accepted", rate, what)
        among = among_rounds(metrics)
        table.add_row(
            "tokens a round",
            f"{metrics.mean_acceptance_length:.2f}",
            f"of at most {metrics.k + 1}{among}",
        )
        by_place = " ".join(f"{100 * r:.0f}" for r in metrics.acceptance_rate_per_pos or ())
        table.add_row("by position", "", f"{by_place} % accepted")
    elif metrics.k and metrics.num_drafts == 0:
        table.add_row("accepted", "–", _NO_PROPOSALS)
    times = ", ".join(f"{s} {metrics.stage_ms(s):.2f}" for s in stages_in([metrics]))
    if metrics.round_ms is not None:
        table.add_row("round", f"{metrics.round_ms:.2f}", f"ms: {times}" if times else "ms")
    if metrics.ttft_ms.p50 is not None:
        parts = first_token_parts(metrics)
        median = f"ms (median){f': {parts}' if parts else ''}"
        table.add_row("first token", f"{metrics.ttft_ms.p50:.1f}", median)
    for remark in remarks:
        table.add_row("note", "", remark)
    return table


def first_token_parts(metrics: Metrics) -> str:
    """List the parts of the time to the first token with their means in ms, such as `first round
    3.2`. Parts under 0.05 ms are left out."""
    parts = metrics.ttft_parts_ms or {}
    shown = [
        f"{what} {parts[name]:.1f}"
        for name, what in TTFT_PARTS.items()
        if parts.get(name, 0.0) >= 0.05
    ]
    return ", ".join(shown)


def summary_line(metrics: Metrics, remarks: Sequence[str] = ()) -> str:
    """Write the metrics of a run in one line, for logs."""
    line = (
        f"{counted(metrics.num_prompts, 'prompt')}, {counted(metrics.num_output_tokens, 'token')}, "
        f"{metrics.decode_tokens_per_second:.1f} tokens/s decoding, k={metrics.k}"
    )
    if metrics.num_drafts:
        among = among_rounds(metrics)
        line += (
            f", {metrics.mean_acceptance_length:.2f} tokens a round{among}, "
            f"{100 * (metrics.draft_acceptance_rate or 0):.0f}% of proposals accepted"
        )
    elif metrics.k and metrics.num_drafts == 0:
        line += f", {_NO_PROPOSALS}"
    return "; ".join([line, *remarks])


def verdict_line(metrics: Metrics, baseline: Metrics) -> str:
    """Say in one line whether speculation pays."""
    speedup = metrics.decode_tokens_per_second / baseline.decode_tokens_per_second
    if speedup < 1.0:
        return (
            f"Speculation is slower here: {speedup:.2f}x the speed of k = 0. Proposing costs more "
            "than the accepted tokens save; try a smaller k or a different draft."
        )
    return f"Speculation is {speedup:.2f}x as fast as k = 0 here."


def print_summary(
    metrics: Metrics, baseline: Metrics | None, remarks: Sequence[str], **look: bool
) -> None:
    """Print acceptance and times on stderr: a table on a terminal, otherwise one line.

    baseline: the metrics at k = 0, if they were measured. remarks, look: as for `summary_table`.
    """
    out = console(sys.stderr)
    if not sys.stderr.isatty():
        out.print(summary_line(metrics, remarks))
        return
    out.print()
    out.print(summary_table(metrics, baseline, remarks=remarks, **look))
    if baseline is not None and baseline.decode_tokens_per_second:
        out.print(verdict_line(metrics, baseline))
