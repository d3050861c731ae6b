"""Writes docs/demo-sweep, the report on the demo target with a draft, a head and n-grams, and the
table in docs/sweep.md, from the samples in docs/demo-sweep/run.

    python scripts/docs/demo_sweep.py

The samples are those of a machine with nothing else to do:

    specdec sweep-k demo --draft demo:draft --draft demo:eagle3 --draft ngram --k 1-6 --limit 80
      --max-new-tokens 64 --set run.repeats=1 -o docs/demo-sweep/run
"""

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from specdec_cli.experiment.sweep.merge import merge_folders
from specdec_cli.report.content import Content
from specdec_cli.report.folder import read_folder
from specdec_cli.report.write import write_report
from specdec_cli.terminal.sweep import print_results

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "demo-sweep"
PAGE = DOCS / "sweep.md"
_FORMATS = ("html", "md", "png")
_BEFORE, _AFTER = "<!-- the demo's table -->\n```\n", "```\n"


@contextmanager
def recomputed() -> Iterator[tuple[Content, str]]:
    """The report's content and what the terminal shows, all computed anew from the samples."""
    with TemporaryDirectory() as scratch:
        whole = Path(scratch) / "demo"
        document, _ = merge_folders([FOLDER / "run"], whole)
        with redirect_stdout(io.StringIO()) as shown:
            print_results(document)
        text = "".join(f"{line.rstrip()}\n" for line in shown.getvalue().splitlines())
        yield Content(read_folder(whole)), text


def with_table(page: str, table: str) -> str:
    """docs/sweep.md with this table. Raises `ValueError` if the page has no place for it."""
    before, found, rest = page.partition(_BEFORE)
    if not found:
        raise ValueError(f"{PAGE} has no place for the table")
    return before + found + table + rest[rest.index(_AFTER) :]


def main() -> None:
    with recomputed() as (content, table):
        shutil.rmtree(FOLDER / "plots", ignore_errors=True)
        for file in write_report(content, FOLDER, _FORMATS):
            print(file.relative_to(DOCS.parent))
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")
    print(PAGE.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
