"""Writes the reports of sweeps in docs, and a table on a page, from the samples beside them.

    python scripts/docs/sweep_pages.py [SWEEP...]

comparison.py writes the tables that compare methods.

smollm2 and smollm2-sampled ran on GPUs, the others on two CPU cores:

    specdec sweep-k smollm2-offline --chat --draft demo:smollm2-eagle3 --draft demo:smollm2-mtp
      --draft demo:smollm2-dspark --draft DFLASH/speculator --draft demo:smollm2-draft
      --draft ngram --prompt-file question.jsonl --k 2,4,6 --batch-size 1,8,32
      --max-new-tokens 128 --set run.repeats=1 --set target.dtype=bfloat16
      --set draft.dtype=bfloat16 --shard 0/3 [--temperature 0.7]
    specdec sweep-k smollm2-offline --chat (the same drafts and file) --k 2,4
      --sample stratified --limit 39 --batch-size 1,8,32 --max-new-tokens 64 --set run.repeats=1
      --set target.dtype=float32 --set draft.dtype=float32 --device cpu
      (and --limit 32 --temperature 0.7)
    specdec sweep-k demo --draft demo:draft --draft demo:eagle3 --draft ngram --k 1-6 --limit 80
      --max-new-tokens 64 --set run.repeats=1
    specdec sweep-k demo --draft demo:eagle3 (and mtp, dspark, dflash, peagle, draft, ngram)
      --k 1,2,3,4,6 --limit 80 --shard 0/2 (and 1/2) --batch-size 1 --max-new-tokens 64
      --set run.repeats=1 --device cpu --threads 2

question.jsonl is Spec-Bench's. Large files of samples are compressed. The basis of the sampled
sweep's predictions (replay.jsonl, 3 MB compressed) is left out.
"""

import io
import lzma
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from specdec_cli.experiment.sweep.merge import merge_folders
from specdec_cli.report.content import Content
from specdec_cli.report.folder import read_folder
from specdec_cli.report.write import write_report
from specdec_cli.terminal.sweep import print_results

DOCS = Path(__file__).parents[2] / "docs"
_AFTER = "```\n"


@dataclass(frozen=True)
class Sweep:
    """A sweep whose samples are in docs: its folder there, and a page with its table, if any.

    formats: of the report.
    """

    name: str
    page: str | None = None
    formats: tuple[str, ...] = ("html", "md", "png")

    @property
    def folder(self) -> Path:
        return DOCS / self.name

    @property
    def before(self) -> str:
        """The lines of the page just before the table."""
        return f"<!-- the table of {self.name} -->\n```\n"

    @contextmanager
    def recomputed(self) -> Iterator[tuple[Content, str]]:
        """The report's content and what the terminal shows, all computed anew from the samples."""
        with TemporaryDirectory() as scratch:
            run, whole = Path(scratch) / "run", Path(scratch) / self.name.removesuffix("-sweep")
            shutil.copytree(self.folder / "run", run)
            for packed in run.glob("*.xz"):
                packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
                packed.unlink()
            document, _ = merge_folders([run], whole)
            with redirect_stdout(io.StringIO()) as shown:
                print_results(document, with_pairs=True)
            text = "".join(f"{line.rstrip()}\n" for line in shown.getvalue().splitlines())
            yield Content(read_folder(whole)), text

    def with_table(self, page: str, table: str) -> str:
        """The page with this table. Raises `ValueError` if the page has no place for it."""
        before, found, rest = page.partition(self.before)
        if not found:
            raise ValueError(f"{self.page} has no place for the table")
        return before + found + table + rest[rest.index(_AFTER) :]

    def write(self) -> None:
        with self.recomputed() as (content, table):
            shutil.rmtree(self.folder / "plots", ignore_errors=True)
            for file in write_report(content, self.folder, self.formats):
                print(file.relative_to(DOCS.parent))
        if self.page is None:
            return
        page = DOCS / self.page
        changed = self.with_table(page.read_text(encoding="utf-8"), table)
        page.write_text(changed, encoding="utf-8")
        print(page.relative_to(DOCS.parent))


SWEEPS = (
    Sweep("smollm2", formats=("md", "png")),
    Sweep("smollm2-sampled", formats=("md",)),
    Sweep("smollm2-cpu", formats=("md",)),
    Sweep("smollm2-cpu-sampled", formats=("md",)),
    Sweep("demo-methods", formats=("md",)),
    Sweep("demo-sweep", "sweep.md"),
)


def main() -> None:
    by_name = {sweep.name: sweep for sweep in SWEEPS}
    names = sys.argv[1:] or list(by_name)
    if unknown := [name for name in names if name not in by_name]:
        sys.exit(f"error: no sweep {unknown[0]!r}; {', '.join(by_name)}")
    for name in names:
        by_name[name].write()


if __name__ == "__main__":
    main()
