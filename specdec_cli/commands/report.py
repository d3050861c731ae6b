"""`specdec report`: turns run folders into a page, plots and tables.

Parses the command line; `specdec_cli.report` does the work. Does not need torch.
"""

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_cli.commands import options
from specdec_cli.commands.starting import NUMPY_MIB, check_room
from specdec_cli.commands.status import set_up_logging, warn
from specdec_cli.errors import Notice, UsageError
from specdec_cli.launch.world import Place
from specdec_cli.text import counted, inert, inert_json

Folders = Annotated[
    list[Path],
    typer.Argument(
        metavar="DIR...",
        parser=options.folder,
        help="Run folders of sweep-k or compare-tp, finished or not; several folders are compared.",
    ),
]
_OUTPUT = (
    "Folder for the files. Default: the run folder, or none for several. NAME.html writes only "
    "that page."
)
Output = Annotated[
    Path | None, options.option("-o --output", "DIR", _OUTPUT, parser=options.folder)
]
_FORMAT = (
    "Comma-separated choice of html, png, svg, pdf, csv, tex, md and vllm. "
    "Default: html,png,csv,md,vllm."
)
Format = Annotated[str | None, options.option("--format", "LIST", _FORMAT, show_default=False)]


def report(
    ctx: typer.Context,
    folders: Folders,
    output: Output = None,
    formats: Format = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Turn a run folder into a page, plots, tables and a config for vLLM.

    report.html is self-contained. Prints the answer, then the names of the files. Several folders
    are compared on the prompts that they share, and their other differences are listed.
    """
    place: Place = ctx.obj
    if not place.is_first:
        return
    check_room("numpy", NUMPY_MIB)
    from specdec_cli.report.content import Content
    from specdec_cli.report.folder import read_folder
    from specdec_cli.report.write import FORMATS, USUAL, write_page, write_report

    chosen = [part.strip() for part in formats.split(",")] if formats is not None else USUAL
    if unknown := [part for part in chosen if part not in FORMATS]:
        raise UsageError(f"--format: {unknown[0]!r} is none of {', '.join(FORMATS)}")
    is_page = output is not None and output.suffix.lower() in (".html", ".htm")
    if is_page and formats is not None and set(chosen) != {"html"}:
        raise UsageError(
            f"-o {output} is a single page, but --format asks for {formats}",
            "name a folder with -o, or leave --format out",
        )
    set_up_logging(verbose=verbose)
    if len(folders) > 1:
        found = list(map(os.path.realpath, folders))  # `resolve` fails at loops of symbolic links
        if twice := next((f for i, f in enumerate(folders) if found[i] in found[:i]), None):
            raise UsageError(f"{twice} is given twice", "name each run folder once")
        if is_page or (formats is not None and "vllm" in chosen):
            raise UsageError(
                "one page (-o NAME.html) and a vLLM config need exactly one run folder",
                "name a folder with -o, and choose from html, png, svg, pdf, csv, tex and md",
            )
        _report_runs(folders, output, chosen, as_json=as_json)
        return
    (folder,) = folders
    content = Content(read_folder(folder))
    if is_page:
        assert output is not None
        files = [write_page(content, output)]
    else:
        files = write_report(content, output or folder, chosen)
    document = {
        "schema": "specdec.report/1",
        "kind": content.run.kind,
        "answer": content.headline,
        "answers": content.answers,
        "lossless": content.lossless,
        "is_partial": content.run.is_partial,
        "warnings": [one.as_dict() for one in content.notices],
        "files": [str(file) for file in files],
        "vllm": content.deployment and asdict(content.deployment),
    }
    _tell(document, [content.headline], _in_short(content.notices), as_json=as_json)


def _report_runs(
    folders: list[Path], output: Path | None, formats: Collection[str], *, as_json: bool
) -> None:
    """Compare runs; print the answers and tables, and write files if there is an output folder."""
    from specdec_cli.report.export import aligned
    from specdec_cli.report.findings import warnings
    from specdec_cli.report.run_tables import run_tables
    from specdec_cli.report.runs import side_by_side, warnings_of
    from specdec_cli.report.write import write_runs

    whole = side_by_side(folders)
    files = write_runs(whole, output, formats) if output is not None else []
    document = {
        "schema": "specdec.report-runs/1",
        "kind": "runs",
        "answer": whole.headline,
        "answers": whole.answers,
        **whole.as_dict(),
        "warnings": [Notice("report", told).as_dict() for told in warnings_of(whole)],
        "files": [str(file) for file in files],
    }
    tables = (line for table in run_tables(whole) for line in ("", *aligned(table)))
    told = [
        f"{name}: {one}" for name, run in whole.runs.items() for one in _in_short(warnings(run))
    ]
    _tell(document, [*whole.answers, *tables], told, as_json=as_json)


def _in_short(notices: Sequence[Notice]) -> list[str]:
    """Return the report's own warnings, and one line with the codes of the warnings that the run
    printed."""
    own = [one.message for one in notices if one.code in ("report", "damaged")]
    codes = [one.code for one in notices if one.code not in ("report", "damaged")]
    if not codes:
        return own
    names = ", ".join(dict.fromkeys(codes))
    return [
        *own,
        f"{counted(len(codes), 'warning')} from the run (--json has the messages): {names}",
    ]


def _tell(
    document: dict[str, Any], lines: Sequence[str], warnings: Sequence[str], *, as_json: bool
) -> None:
    """Print the document as JSON, or print `lines`, the names of the files and `warnings` as
    text."""
    if as_json:
        typer.echo(inert_json(json.dumps(document, ensure_ascii=False)))
        return
    for line in (*lines, *document["files"]):
        typer.echo(inert(line))
    warn(warnings)
