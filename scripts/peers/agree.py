"""Compares the rounds of other engines with ours: the same models, prompts and k, greedily.

    PYTHONPATH=. python scripts/peers/agree.py specdec-head.json vllm-head-*.json sglang-head-*.json

Takes files that the scripts here wrote with --count. Those of specdec are the reference. Tokens a
round are the tokens that rounds wrote, divided by the rounds. Ends of texts then count alike: an
engine that proposes k tokens beyond the end takes as many rounds as one that proposes fewer. Texts
may differ if two tokens are nearly equally likely. Prompts with such a text are left out, and
counted. Intervals are over prompts. Exits 1 if an engine differs from ours by more than 1 %.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec_cli.experiment.statistics.stats import SumRatio, interval

OURS = "specdec"
FAR = 0.01
Run = dict[str, Any]  # a run of one engine, recipe and k, as `work.main` writes it
Prompt = dict[str, Any]  # `work.Counted`


@dataclass(frozen=True)
class Row:
    """An engine compared with ours. ours, theirs: tokens a round over the prompts with equal texts.
    ratio: theirs over ours. ends: its interval, None if no prompt differs. same_rounds: the number
    of prompts with as many rounds. ratio_of_all: the ratio over all prompts, with equal texts or
    not. accepted: the share of rounds that accepted positions 1, 2, .., ours and theirs.
    """

    recipe: str
    k: int
    engine: str
    dtype: str
    prompts: int
    equal: int
    same_rounds: int
    ours: float
    theirs: float
    ratio: float
    ends: list[float] | None
    ratio_of_all: float
    accepted: tuple[list[float], list[float]]

    @property
    def is_near(self) -> bool:
        return abs(self.ratio - 1) <= FAR


def compared(ours: Run, theirs: Run) -> Row:
    """The row of another engine. Raises `ValueError` for runs that cannot be compared."""
    if len(ours["prompts"]) != len(theirs["prompts"]):
        raise ValueError(f"{named(theirs)} has other prompts than {named(ours)}")
    pairs = list(zip(ours["prompts"], theirs["prompts"], strict=True))
    alike = [(a, b) for a, b in pairs if a["token_ids"] == b["token_ids"]]
    told = [(a, b) for a, b in alike if a["rounds"] and b["rounds"]]
    ratio = ratio_of(told)
    return Row(
        recipe=ours["recipe"],
        k=ours["k"],
        engine=theirs["engine"],
        dtype=theirs["dtype"],
        prompts=len(pairs),
        equal=len(alike),
        same_rounds=sum(a["rounds"] == b["rounds"] for a, b in alike),
        ours=tokens_a_round([a for a, _ in told]),
        theirs=tokens_a_round([b for _, b in told]),
        ratio=ratio.value,
        ends=interval(ratio),
        ratio_of_all=ratio_of([(a, b) for a, b in pairs if a["rounds"] and b["rounds"]]).value,
        accepted=(
            positions([a for a, _ in told], ours["k"]),
            positions([b for _, b in told], ours["k"]),
        ),
    )


def named(run: Run) -> str:
    return f"{run['engine']} {run['recipe']} k={run['k']}"


def by_rounds(prompt: Prompt) -> int:
    """The tokens that rounds wrote: all but the first, which the pass over the prompt decides."""
    return len(prompt["token_ids"]) - 1


def tokens_a_round(prompts: Sequence[Prompt]) -> float:
    return sum(map(by_rounds, prompts)) / max(1, sum(p["rounds"] for p in prompts))


def ratio_of(pairs: Sequence[tuple[Prompt, Prompt]]) -> SumRatio:
    """The tokens a round of the second run of each pair, over those of the first."""
    rows = [(by_rounds(b), b["rounds"], by_rounds(a), a["rounds"]) for a, b in pairs]
    return SumRatio(np.array(rows, float).reshape(-1, 4), (1, -1, -1, 1))


def positions(prompts: Sequence[Prompt], k: int) -> list[float]:
    """The share of rounds that accepted their first 1, 2, .. k proposals; empty if unknown.

    A text's last round is cut at the text's end, so it is left out; a histogram has it whole.
    """
    stood = [0] * (k + 1)  # rounds by accepted proposals
    for prompt in prompts:
        accepted = [tokens - 1 for tokens in (prompt["written"] or [])[:-1]]
        for n in accepted:
            stood[n] += 1
        if prompt["written"] is None:
            for n, rounds in enumerate(prompt["histogram"] or []):
                stood[n] += rounds
    rounds = sum(stood)
    return [sum(stood[i:]) / rounds for i in range(1, k + 1)] if rounds else []


def beside_ours(runs: Sequence[Run]) -> list[Row]:
    """A row for each run of another engine, by recipe, engine and k."""
    ours = {(run["recipe"], run["k"]): run for run in runs if run["engine"] == OURS}
    others = [run for run in runs if run["engine"] != OURS]
    rows = []
    for run in sorted(others, key=lambda run: (run["recipe"], run["engine"], run["k"])):
        if (beside := ours.get((run["recipe"], run["k"]))) is None:
            raise ValueError(f"nothing of {OURS} beside {named(run)}")
        rows.append(compared(beside, run))
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown."""
    columns = ["speculator", "engine", "k", "texts equal", "rounds equal", "ours", "theirs"]
    columns += ["theirs / ours", "over all texts", "accepted at 1.., ours", "theirs"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        ratio = f"{row.ratio:.4f}"
        if row.ends is not None:
            ratio += f" ({row.ends[0]:.4f} – {row.ends[1]:.4f})"
        shares = [" ".join(f"{100 * x:.1f}" for x in side) for side in row.accepted]
        cells = [row.recipe, f"{row.engine}, {row.dtype}", str(row.k)]
        cells += [f"{row.equal} / {row.prompts}", f"{row.same_rounds} / {row.equal}"]
        cells += [f"{row.ours:.3f}", f"{row.theirs:.3f}", ratio, f"{row.ratio_of_all:.4f}", *shares]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    runs = [run for file in parser.parse_args().files for run in json.loads(file.read_text())]
    rows = beside_ours(runs)
    print("\n".join(table(rows)))
    far = [row for row in rows if not row.is_near]
    for row in far:
        print(f"further than 1 %: {row.engine} {row.recipe} k={row.k}: {row.ratio:.4f}")
    if rows and not far:
        print(f"all {len(rows)} within 1 %")
    return 1 if far or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
