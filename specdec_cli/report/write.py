"""Writes the files of a report atomically."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from specdec_cli.experiment.disk import or_setup_error, replace_file
from specdec_cli.report.content import Content
from specdec_cli.report.drawings.rows import draw_runs
from specdec_cli.report.export import (
    csv_of,
    csv_tables,
    latex_of,
    latex_tables,
    markdown,
    runs_markdown,
)
from specdec_cli.report.page import page, rendered
from specdec_cli.report.plots import PICTURES, Plot, drawing, plots
from specdec_cli.report.run_tables import run_tables
from specdec_cli.report.runs import SideBySide, warnings_of

USUAL = ("html", "png", "csv", "md", "vllm")
FORMATS = (*USUAL, "tex", "svg", "pdf")
_FOLDER = "plots"


def write_report(content: Content, folder: Path, formats: Collection[str]) -> list[Path]:
    """Write a report in the requested formats into a folder. Return the paths of the files, in the
    order in which they were written.

    Raises `SetupError` if the folder cannot be written, or if plots are requested and matplotlib is
    missing.
    """
    drawn = []
    pictures = [form for form in PICTURES if form in formats]
    if pictures or "html" in formats:
        drawn = plots(content, pictures, svg="html" in formats)
    files: dict[str, str] = {}
    if "html" in formats:
        files["report.html"] = page(content, drawn)
    if "md" in formats:
        shown = drawn if "png" in formats else []
        files["report.md"] = markdown(content, shown, f"{_FOLDER}/")
    if "csv" in formats:
        files |= csv_tables(content.run)
    if "tex" in formats:
        files |= latex_tables(content)
    if "vllm" in formats and content.deployment is not None:
        files["vllm.json"] = json.dumps(asdict(content.deployment), indent=2) + "\n"
    return _written(folder, files, drawn)


def write_runs(whole: SideBySide, folder: Path, formats: Collection[str]) -> list[Path]:
    """Write a report that compares several runs into a folder. Return the paths of the files, in
    the order in which they were written. Raises the errors of `write_report`."""
    plot = None
    pictures = [form for form in PICTURES if form in formats]
    if pictures or "html" in formats:
        plot = drawing(
            "runs",
            f"Speeds over those of {whole.names[0]}, on the same prompts, with 95 % intervals.",
            lambda figure: draw_runs(figure, whole),
            pictures,
            svg="html" in formats,
            conclusion=" ".join(whole.answers),
        )
    drawn = [plot] if plot is not None else []
    files, tables = dict[str, str](), run_tables(whole)
    if "html" in formats:
        title = f"specdec: {', '.join(whole.names)}"
        files["report.html"] = rendered(
            "runs.html.j2",
            whole=whole,
            tables=tables,
            plots=drawn,
            title=title,
            warnings=warnings_of(whole),
        )
    if "md" in formats:
        files["report.md"] = runs_markdown(whole, warnings_of(whole))
    for form, text_of in (("csv", csv_of), ("tex", latex_of)):
        if form in formats:
            files |= {f"{table.name}.{form}": text_of(table) for table in tables}
    return _written(folder, files, drawn)


def _written(folder: Path, files: Mapping[str, str], drawn: Sequence[Plot]) -> list[Path]:
    """Write the text files and the plots into the folder. Return their paths in that order."""
    found = {name: _encoded(text) for name, text in files.items()}
    for plot in drawn:
        found |= {f"{_FOLDER}/{plot.name}.{form}": data for form, data in plot.files.items()}
    for name, data in found.items():
        write_file(folder / name, data)
    return [folder / name for name in found]


def write_page(content: Content, file: Path) -> Path:
    """Write only the HTML page, to the given file."""
    write_file(file, _encoded(page(content, plots(content, ()))))
    return file


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def write_file(path: Path, data: bytes) -> None:
    with or_setup_error(f"cannot write {path}", "name another place with -o"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
