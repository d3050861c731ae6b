"""Writes a report as one self-contained HTML page, which includes its plots and has no scripts or
links.

The template engine escapes all values that come from the run folder. Only the plots are inserted
unescaped, because the report draws them itself.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_cli.report.cells import Table, is_text, rows_of
from specdec_cli.report.content import Content, conclusion
from specdec_cli.report.plots import Plot
from specdec_cli.text import inert

_MOST_ROWS = 12  # a table with more rows is collapsed
# The sections in page order: (heading, name of the plot, name of the table).
SECTIONS = (
    ("The best draft TP", "speeds", "degrees"),
    ("Speed", "speedup", "results"),
    ("Under load", "load", "load"),
    ("Break-even", "break_even", "break_even"),
    ("Arm against arm", "comparisons", "comparisons"),
    ("Arm against arm, by category", "", "category_pairs"),
    ("Acceptance by position", "acceptance", ""),
    ("Where a round's time goes", "rounds", "rounds"),
    ("Experts that scoring reads", "experts", ""),
    ("By category of prompt", "categories", "categories"),
    ("Predicted and measured", "predictions", "predictions"),
    ("Latency", "", "latencies"),
    ("The first token", "", "first_tokens"),
)


@dataclass(frozen=True, slots=True)
class Part:
    """One section of the page.

    picture: the name of its plot.
    conclusion: one sentence that says what the section shows.
    table: None if the section has only a plot.
    is_folded: whether the table is collapsed at first, because it is long or because the plot is
        enough.
    """

    title: str
    picture: str
    conclusion: str
    table: Table | None
    is_folded: bool


def page(content: Content, plots: Sequence[Plot]) -> str:
    """Render a report as an HTML page, and return the HTML."""
    return rendered(
        "page.html.j2",
        content=content,
        plots=plots,
        sections=parts(content, plots),
        environment=rows_of(content.run.environment),
    )


def parts(content: Content, plots: Sequence[Plot]) -> list[Part]:
    """Return the sections to show: those that have a plot or a table with rows. The table of
    results is shown even without rows."""
    drawn, found = {plot.name for plot in plots}, []
    for title, picture, name in SECTIONS:
        table = content.tables.get(name)
        is_main = name == "results"
        shown = table if table is not None and (table.rows or is_main) else None
        if shown is not None or picture in drawn:
            told = conclusion(picture or name, content)
            is_long = shown is not None and len(shown.rows) > _MOST_ROWS
            is_folded = is_long or (picture in drawn and not is_main)
            found.append(Part(title, picture, told, shown, is_folded))
    return found


def rendered(template: str, **values: Any) -> str:
    """Render a Jinja template from this folder with the given values, and return the HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    engine = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    engine.filters["inert"] = lambda value: inert(str(value))
    engine.filters["pretty"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
    engine.filters["drawn"] = Markup  # not escaped again: a plot's text is escaped as it is drawn
    engine.globals["is_text"] = is_text
    return engine.get_template(template).render(**values)
