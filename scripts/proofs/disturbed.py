"""Sweeps that other work disturbs are told apart from quiet ones, and do not mislead.

    python scripts/proofs/disturbed.py [--sweeps 20] [--limit 24] [--hogs N] [--keep FOLDER]

Runs sweeps of the demo pair and of n-grams in turn: one left alone, one with processes that keep
every processor busy from the moment when half of its samples are there. Exits with 1 unless at
least 19 of 20 disturbed sweeps are warned about, at most 1 of 20 quiet ones, and the winner of at
least 19 of 20 disturbed ones is the quiet ones' or tied with it. The machine has to be quiet.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_cli.experiment.disturbed import DISTURBED

_KS = "0-4"
_BUSY = [sys.executable, "-c", "while True: pass"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """codes: warnings about noise. best: k and draft. tied: points tied with the fastest."""

    codes: tuple[str, ...]
    best: tuple[Any, Any]
    tied: tuple[tuple[Any, Any], ...]
    reason: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sweeps", type=int, default=20)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--hogs", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args()
    found: dict[bool, list[Outcome]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as scratch:
        base = asked.keep or Path(scratch)
        for number in range(asked.sweeps):
            for is_disturbed in (False, True):
                folder = base / f"{'disturbed' if is_disturbed else 'quiet'}-{number}"
                hogs = asked.hogs if is_disturbed else 0
                outcome = swept(folder, asked.limit, hogs, number)
                found[is_disturbed].append(outcome)
                codes = ", ".join(outcome.codes) or "no warning"
                print(f"{folder.name}: {codes}; best {outcome.best}", flush=True)
    return judged(found[False], found[True])


def swept(folder: Path, limit: int, hogs: int, seed: int) -> Outcome:
    """Run one sweep; `hogs` processes begin when half of its samples are there."""
    program = [
        *(sys.executable, "-m", "specdec_cli", "sweep-k", "demo", "--device", "cpu", "-q"),
        *("--draft", "demo:draft", "--draft", "ngram", "--k", _KS, "--limit", str(limit)),
        *("--max-new-tokens", "32", "--seed", str(seed), "-o", str(folder)),
    ]
    busy: list[subprocess.Popen[bytes]] = []
    sweep = subprocess.Popen(program, stdout=subprocess.DEVNULL)
    half = limit * (1 + 2 * 4) // 2
    try:
        while sweep.poll() is None:
            if hogs and not busy and _lines(folder / "samples.jsonl") >= half:
                busy = [subprocess.Popen(_BUSY) for _ in range(hogs)]
            time.sleep(0.05)
    finally:
        for process in (sweep, *busy):
            process.kill()
            process.wait()
    document = json.loads((folder / "summary.json").read_text())
    best = document["best"]
    return Outcome(
        tuple(sorted({w["code"] for w in document["warnings"]} & DISTURBED)),
        (best["k"], best["draft"]),
        tuple((point["k"], point["draft"]) for point in best["tied_points"]),
        best["reason"],
    )


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def judged(quiet: list[Outcome], disturbed: list[Outcome]) -> int:
    """Print the shares; returns the exit code."""
    winner, _ = Counter(one.best for one in quiet).most_common(1)[0]
    ties = {point for one in quiet for point in one.tied} | {winner}
    told = sum(bool(one.codes) for one in disturbed)
    false = sum(bool(one.codes) for one in quiet)
    right = sum(one.best in ties or winner in one.tied for one in disturbed)
    count = len(disturbed)
    print(f"quiet winner: k = {winner[0]} with {winner[1]}")
    print(f"warned of {told} of {count} disturbed sweeps and of {false} of {len(quiet)} quiet ones")
    print(f"the winner of {right} of {count} disturbed sweeps is the quiet ones' or tied with it")
    is_right = told >= 0.95 * count and false <= 0.05 * len(quiet) and right >= 0.95 * count
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
