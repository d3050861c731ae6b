"""Writing the files of a report atomically."""

import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from specdec_cli.experiment.disk import or_setup_error, replace_file
from specdec_cli.report.content import Content
from specdec_cli.report.export import csv_tables, markdown
from specdec_cli.report.page import page
from specdec_cli.report.plots import plots

FORMATS = ("html", "png", "csv", "md", "vllm")
PICTURES = "plots"


def write_report(content: Content, folder: Path, formats: Collection[str]) -> list[Path]:
    """Write the formats asked for into a folder; returns the files in order.

    html: report.html. png: plots/NAME.png. csv: points.csv, acceptance.csv, categories.csv,
    comparisons.csv. md: report.md. vllm: vllm.json. Raises `SetupError` when the folder cannot be
    written, or plots are asked for and matplotlib is missing.
    """
    drawn = []
    if {"html", "png"} & set(formats):
        drawn = plots(content, png="png" in formats, svg="html" in formats)
    files: dict[str, bytes] = {}
    if "html" in formats:
        files["report.html"] = _encoded(page(content, drawn))
    if "md" in formats:
        pictures = drawn if "png" in formats else []
        files["report.md"] = _encoded(markdown(content, pictures, f"{PICTURES}/"))
    if "csv" in formats:
        files |= {name: _encoded(text) for name, text in csv_tables(content.run).items()}
    if "vllm" in formats and content.deployment is not None:
        text = json.dumps(asdict(content.deployment), indent=2)
        files["vllm.json"] = _encoded(f"{text}\n")
    if "png" in formats:
        files |= {f"{PICTURES}/{plot.name}.png": plot.png for plot in drawn}
    for name, data in files.items():
        write_file(folder / name, data)
    return [folder / name for name in files]


def write_page(content: Content, file: Path) -> Path:
    """Write only the HTML page, to any file."""
    write_file(file, _encoded(page(content, plots(content, png=False))))
    return file


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def write_file(path: Path, data: bytes) -> None:
    with or_setup_error(f"cannot write {path}", "name another place with -o"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
