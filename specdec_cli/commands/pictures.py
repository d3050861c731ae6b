"""The report's page and plots, which commands write into their run folders."""

from pathlib import Path

from specdec_cli.commands.status import warn
from specdec_cli.errors import SetupError


def write_pictures(folder: Path, *, quiet: bool) -> None:
    """Write `report.html` and `plots/`, or warn that matplotlib is missing."""
    from specdec_cli.report.content import Content
    from specdec_cli.report.folder import read_folder
    from specdec_cli.report.write import write_report

    try:
        write_report(Content(read_folder(folder)), folder, ("html", "png"))
    except SetupError as problem:
        if not quiet:
            warn([f"no plots: {problem.message}"])
