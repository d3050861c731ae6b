"""Shows that disturbed sweeps are distinguished from quiet ones, and do not mislead.

    python scripts/proofs/disturbed.py [--sweeps 20] [--limit 16] [--hogs N] [--keep FOLDER]

Runs sweeps of the demo pair and of n-grams in pairs. One is left alone. Beside the other, processes
keep every processor busy once half of its samples are there. A pair takes about 90 s and prints a
line. Exits with 1 unless at least 95 % of the disturbed sweeps are warned about, at most 5 % of the
quiet ones, and the winner of at least 95 % of the disturbed ones is the quiet ones' or tied with
it: 19, 1 and 19 of 20. Ctrl-C or SIGTERM ends it after the last whole pair. The machine has to be
quiet. A pair's line shows the processor time of other processes during its quiet sweep.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_cli.experiment.statistics.noise import DISTURBED

# Every other k is measured: points between them would take time and decide nothing more.
_KS = (0, 2, 4)
_BUSY = [sys.executable, "-c", "while True: pass"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """codes: warnings about noise. best: k and draft. tied: points tied with the fastest. seconds:
    the time of the whole command. others: the mean number of processors that other processes kept
    busy.
    """

    codes: tuple[str, ...]
    best: tuple[Any, Any]
    tied: tuple[tuple[Any, Any], ...]
    seconds: float
    others: float

    @property
    def told(self) -> str:
        return f"{', '.join(self.codes) or 'no warning'}; best {_name(self.best)}"


Pair = tuple[Outcome, Outcome]  # quiet and disturbed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sweeps", type=int, default=20)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--hogs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args()
    for ending in (signal.SIGINT, signal.SIGTERM):  # a shell may have made the process ignore them
        signal.signal(ending, signal.default_int_handler)
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory() as scratch:
        base = asked.keep or Path(scratch)
        try:
            for number in range(asked.sweeps):
                quiet = swept(base / f"quiet-{number}", asked.limit, 0, number)
                disturbed = swept(base / f"disturbed-{number}", asked.limit, asked.hogs, number)
                pairs.append((quiet, disturbed))
                print(line_of(number, quiet, disturbed), flush=True)
        except KeyboardInterrupt:
            print(f"ended after {len(pairs)} of {asked.sweeps} pairs")
    return judged(pairs) if pairs else 1


def swept(folder: Path, limit: int, hogs: int, seed: int) -> Outcome:
    """Run one sweep; `hogs` processes begin when half of its samples are there."""
    program = [
        *(sys.executable, "-m", "specdec_cli", "sweep-k", "demo", "--device", "cpu", "-q"),
        *("--draft", "demo:draft", "--draft", "ngram", "--k", ",".join(map(str, _KS))),
        *("--limit", str(limit), "--max-new-tokens", "32", "--seed", str(seed), "-o", str(folder)),
    ]
    busy: list[subprocess.Popen[bytes]] = []
    began, busy_before, own_before = time.monotonic(), _busy_seconds(), _own_seconds()
    sweep = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    total, is_busy = limit * (1 + 2 * (len(_KS) - 1)), False
    try:
        while sweep.poll() is None:
            count = _lines(folder / "samples.jsonl") if hogs else 0
            if count >= total // 2 and hogs and not is_busy:
                busy, is_busy = [subprocess.Popen(_BUSY) for _ in range(hogs)], True
            if count >= total:  # only the report is left
                for process in busy:
                    process.kill()
            time.sleep(0.1)
    finally:
        for process in (sweep, *busy):
            process.kill()
            process.wait()
    seconds = time.monotonic() - began
    others = _busy_seconds() - busy_before - (_own_seconds() - own_before)
    document = json.loads((folder / "summary.json").read_text())
    best = document["best"]
    return Outcome(
        tuple(sorted({w["code"] for w in document["warnings"]} & DISTURBED)),
        (best["k"], best["draft"]),
        tuple((point["k"], point["draft"]) for point in best["tied_points"]),
        seconds,
        max(others, 0.0) / seconds,
    )


def _busy_seconds() -> float:
    """Seconds that all processors worked, or were stolen by the machine below, since it began."""
    fields = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Processor seconds of this process and of those that it waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _name(best: tuple[Any, Any]) -> str:
    return f"k = {best[0]} with {best[1]}"


def line_of(number: int, quiet: Outcome, disturbed: Outcome) -> str:
    """A pair in one line."""
    return (
        f"pair {number}: quiet: {quiet.told} ({quiet.others:.2f} processors busy otherwise) | "
        f"disturbed: {disturbed.told} | {quiet.seconds + disturbed.seconds:.0f} s"
    )


def judged(pairs: list[Pair]) -> int:
    """Print the shares. Returns the exit code."""
    quiet, disturbed = ([pair[side] for pair in pairs] for side in (0, 1))
    winner, _ = Counter(one.best for one in quiet).most_common(1)[0]
    ties = {point for one in quiet for point in one.tied} | {winner}
    told = sum(bool(one.codes) for one in disturbed)
    false = sum(bool(one.codes) for one in quiet)
    right = sum(one.best in ties or winner in one.tied for one in disturbed)
    count = len(pairs)
    for name, ones in (("quiet", quiet), ("disturbed", disturbed)):
        codes = Counter(code for one in ones for code in one.codes).most_common()
        print(f"{name}: {', '.join(f'{code} {n}' for code, n in codes) or 'no warning'}")
    print(f"quiet winner: {_name(winner)}")
    print(f"warned of {told} of {count} disturbed sweeps and of {false} of {count} quiet ones")
    print(f"the winner of {right} of {count} disturbed sweeps is the quiet ones' or tied with it")
    is_right = told >= 0.95 * count and false <= 0.05 * count and right >= 0.95 * count
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
