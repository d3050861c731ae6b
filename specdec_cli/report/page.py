"""A report as one self-contained HTML page: no scripts, no links, plots inside.

The template engine escapes everything from the folder; only our own plots are not escaped.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_cli.report.cells import is_text
from specdec_cli.report.content import Content
from specdec_cli.report.plots import Plot
from specdec_cli.text import inert


def page(content: Content, plots: Sequence[Plot]) -> str:
    """The page's text."""
    return rendered(
        "page.html.j2",
        content=content,
        plots=plots,
        has_acceptance=any(plot.name == "acceptance" for plot in plots),
        environment=rows_of(content.run.environment),
    )


def rendered(template: str, **values: Any) -> str:
    """A template of this folder, filled in."""
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
    engine.filters["drawn"] = Markup  # text in plots was escaped when drawn
    engine.globals["is_text"] = is_text
    return engine.get_template(template).render(**values)


def rows_of(environment: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The environment as dotted keys and values."""
    found: list[tuple[str, str]] = []
    for key, value in environment.items():
        if isinstance(value, Mapping):
            found += rows_of(value, f"{prefix}{key}.")
        else:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            found.append((f"{prefix}{key}", shown))
    return found
