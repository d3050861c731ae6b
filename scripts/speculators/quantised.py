"""Tokens a round of targets and speculators in several forms, compared with those of the plain
forms.

    python -m scripts.speculators.quantised plain.json fp8.json int4.json

Each file is the result of `evaluate.py --json` for one target. The file's name says the target's
form. Runs are of speculators in folders NAME, NAME-fp8 and NAME-int4 (`store.py` makes them), or of
methods without a draft. Two folders of one name in a file are refused. Each line has the ratio to
NAME over the first file's target at the same k, with its 95 % interval, paired over prompts: every
run has the same ones, and writes its own texts.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from scripts.speculators import commands
from scripts.speculators.evaluate import with_interval
from specdec_cli.experiment.statistics.stats import SumRatio

FORM = re.compile("(.+?)(?:-(fp8|int4))?")
Run = tuple[str, str, str, int]  # the target's form, the speculator's name and form, and k


def runs_of(files: list[Path]) -> dict[Run, SumRatio]:
    """The tokens and rounds of each prompt by run.

    Raises `ValueError` if two speculators in a file, or two files, have one name.
    """
    found: dict[Run, SumRatio] = {}
    sources: dict[tuple[str, str, str], str] = {}
    for file in files:
        evaluated: dict[str, Any] = json.loads(file.read_text())
        for speculator, runs in evaluated["runs"].items():
            match = FORM.fullmatch(Path(speculator).name)
            assert match is not None
            named = file.stem, match[1], match[2] or "plain"
            source = f"{speculator} in {file}"
            if (other := sources.setdefault(named, source)) != source:
                raise ValueError(f"{other} and {source} have one name: give each its own")
            for run in runs:
                counts = np.array(run["counts"], float)
                found[*named, run["k"]] = SumRatio(counts, (1, -1))
    return found


def lines(runs: dict[Run, SumRatio]) -> list[str]:
    """A table in Markdown.

    Raises `ValueError` if compared runs have different prompts.
    """
    first = next(iter(runs))[0]
    found = ["| speculator | k | target | its form | tokens a round | beside both plain |"]
    found.append("|---|---|---|---|---|---|")
    for key in sorted(runs, key=lambda key: (key[1], key[3])):
        target, name, form, k = key
        value, ends = with_interval(runs[key])
        told = f"{value:.2f}" + (" ({:.2f}–{:.2f})".format(*ends) if ends else "")
        base, beside = runs.get((first, name, "plain", k)), ""
        if base is not None and base is not runs[key]:
            if base.columns.shape != runs[key].columns.shape:
                raise ValueError(f"{name} at k = {k} ran on other prompts over {first}")
            ratio, ends = with_interval(runs[key].over(base))
            beside = f"{ratio:.3f}" + (" ({:.3f}–{:.3f})".format(*ends) if ends else "")
        found.append(f"| {name} | {k} | {target} | {form} | {told} | {beside} |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=commands.Help
    )
    parser.add_argument("files", nargs="+", type=Path)
    print("\n".join(lines(runs_of(parser.parse_args().files))))


if __name__ == "__main__":
    commands.run(main)
