"""Prices the acceptance that a sweep measured at the round times of other, larger models.

A sweep over a real model says how many tokens a round of each arm writes. `rounds.py` times rounds
of the same kinds on random weights of other shapes. Together they say which arm would win there, if
it were accepted as often, and what acceptance it needs to break even.

    python scripts/bench/prices.py rates            # acceptance rates by position, for each arm
    python scripts/bench/rounds.py bench-8b-eagle3-dummy --k 0,2,4,6 --batch-size 1,32 \\
        --set speculation.synthetic_acceptance_rates=RATES --json 8b-head.json
    python scripts/bench/prices.py table 8b demo:smollm2-eagle3=8b-head.json ngram=8b-ngram.json ...

Rates count all rounds: a round in which n-grams found nothing accepts no proposal. The sweep is
docs/smollm2/run, at its batch size 1.
"""

import json
import lzma
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_cli.experiment.forecasts import chance_for

SAMPLES = Path(__file__).parents[2] / "docs" / "smollm2" / "run" / "samples.jsonl.xz"
Samples = list[dict[str, Any]]
COLUMNS = "| model | batch | arm | k | round ms | tokens a round | x plain | break-even | chance |"


def samples(path: Path) -> Samples:
    """The samples of a sweep with batch size 1."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    return [sample for sample in found if sample["batch_size"] == 1 and sample["k"] > 0]


def of_arm(found: Samples, arm: str) -> dict[int, Samples]:
    """The samples of one arm by k."""
    own = [sample for sample in found if sample["draft"] == arm]
    return {k: [s for s in own if s["k"] == k] for k in sorted({s["k"] for s in own})}


def rates(found: Samples, k: int) -> list[float]:
    """For each position the share of rounds in which its proposal was accepted.

    The last rounds of a text propose fewer than k and are left out.
    """
    rounds, accepted = 0, [0] * k
    for sample in found:
        pairs = zip(sample["accepted_per_round"], sample["proposed_per_round"], strict=True)
        counts = [stood for stood, proposed in pairs if proposed == k]
        rounds += len(counts) + sample["rounds_without_proposal"]
        for i in range(k):
            accepted[i] += sum(count > i for count in counts)
    return [count / rounds for count in accepted]


@dataclass(frozen=True)
class Price:
    """A row of the table. ratio: speed over plain decoding's. needed: tokens a round at which they
    are equal."""

    batch_size: int
    arm: str
    k: int
    round_ms: float
    length: float
    ratio: float
    needed: float

    def row(self, model: str) -> str:
        chance = chance_for(self.needed, self.k)
        return (
            f"| {model} | {self.batch_size} | {self.arm} | {self.k} | {self.round_ms:.2f} "
            f"| {self.length:.2f} | {self.ratio:.2f} | {self.needed:.2f} "
            f"| {'none' if chance is None else f'{chance:.0%}'} |"
        )


def prices(arm: str, rows: list[dict[str, Any]], found: dict[int, Samples]) -> Iterator[Price]:
    """The prices of one arm. rows: as `rounds.py --json` writes them, with k = 0 among them."""

    def milliseconds(row: dict[str, Any]) -> float:
        return statistics.median(m["round_ms"] for m in row["metrics"])

    plain = {row["batch_size"]: milliseconds(row) for row in rows if row["k"] == 0}
    for row in rows:
        k, batch_size, took = row["k"], row["batch_size"], milliseconds(row)
        if k in found:
            length = 1 + sum(rates(found[k], k))
            needed = took / plain[batch_size]
            yield Price(batch_size, arm, k, took, length, length / needed, needed)


def main(arguments: list[str]) -> None:
    found = samples(SAMPLES)
    if arguments == ["rates"]:
        for arm in sorted({sample["draft"] for sample in found}):
            by_k = of_arm(found, arm)
            k = max(by_k)
            print(arm, json.dumps([round(rate, 4) for rate in rates(by_k[k], k)]))
        return
    if len(arguments) < 3 or arguments[0] != "table":
        sys.exit(__doc__)
    print(COLUMNS + "\n|" + "---|" * COLUMNS.count(" |"))
    rows = [
        price
        for arm, path in (pair.split("=", 1) for pair in arguments[2:])
        for price in prices(arm, json.loads(Path(path).read_text()), of_arm(found, arm))
    ]
    for price in sorted(rows, key=lambda p: (p.batch_size, p.arm, p.k)):
        print(price.row(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
