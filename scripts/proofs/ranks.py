"""Tests of the real command with several ranks: failing ranks, signals to the parent, equal tokens.

    python scripts/proofs/ranks.py [--timeout 8] [--device cpu] [--target-tp 2] [--only WORD]

Each row of the table is one `specdec generate` with several ranks. "seconds" counts from the fault
or signal to the end of the last process; "left" counts processes that outlive the run.
"""

import argparse
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.launch.helpers import marked, start, wait_until_gone  # noqa: E402

MODES = {
    "raise": "ArithmeticError: the planted error",
    "kill": "was killed by SIGKILL",
    "hang": "hung in ",
    "gone": "ended without a report",
}
SIGNALS = {"INT": 130, "TERM": 143, "HUP": 143, "KILL": -9}
SIGNAL_S = 5.0


@dataclass(frozen=True)
class Row:
    """One run: the fault, the outcome, and True if the outcome is as promised."""

    name: str
    code: int
    seconds: float
    left: int
    said: str
    is_good: bool


def command(options: argparse.Namespace, *extra: str) -> list[str]:
    recipe = ["--device", options.device, "--target-tp", str(options.target_tp)]
    timeout = ["--set", f"run.timeout_s={options.timeout}", "-q"]
    return ["-m", "specdec_cli", "generate", *recipe, *timeout, *extra]


def failing(options: argparse.Namespace, mode: str, stage: str, rank: int) -> Row:
    """Make a rank fail in a stage."""
    fault = f"{mode}:{stage}:{rank}"
    paths = f"{ROOT / 'tests' / 'launch' / 'site'}:{ROOT}:{ROOT / 'kernels'}"
    environ = marked(**options.environ, PYTHONPATH=paths, PLANTED_FAULT=fault)
    draft_tp = ["--draft-tp", str(options.target_tp)]
    parent = start(command(options, *draft_tp, "--prompt", "def add(a, b):"), environ)
    _, err = parent.communicate()
    ended, left = time.time(), wait_until_gone(environ, SIGNAL_S)
    fault_at = [float(line.split()[-1]) for line in err.splitlines() if "fault at" in line]
    seconds = ended - fault_at[0] if fault_at else float("nan")
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    is_named = len(errors) == 1 and errors[0].startswith(f"error: rank {rank}: {MODES[mode]}")
    is_good = is_named and parent.returncode == 1 and seconds < options.timeout + 10 and not left
    return Row(fault, parent.returncode, seconds, len(left), " / ".join(errors), is_good)


def signalled(options: argparse.Namespace, name: str) -> Row:
    """Send the parent a signal while the ranks decode."""
    environ = marked(**options.environ)
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.jsonl")
        prompts.write_text("".join('{"prompt": "def add(a, b):"}\n' for _ in range(10000)))
        out = Path(folder, "run")
        parent = start(command(options, "--prompt-file", str(prompts), "-o", str(out)), environ)
        samples = out / "samples.jsonl"
        while not (samples.exists() and samples.stat().st_size) and parent.poll() is None:
            time.sleep(0.1)
        sent = time.time()
        parent.send_signal(getattr(signal, f"SIG{name}"))
        left = wait_until_gone(environ, SIGNAL_S)
        seconds = time.time() - sent
        _, err = parent.communicate()
    said = " / ".join(err.splitlines())
    return Row(
        f"SIG{name}",
        parent.returncode,
        seconds,
        len(left),
        said,
        parent.returncode == SIGNALS[name] and not left,
    )


def equal(options: argparse.Namespace, draft_tp: int, *how: str) -> Row:
    """Compare the tokens of a run over ranks with those of one rank, in fp32."""
    prompts = [part for text in ("def add(a, b):", "class Stack:") for part in ("--prompt", text)]
    common = ["--json", "--dtype", "float32", "--max-new-tokens", "48", *prompts, *how]
    found = []
    for extra in (["--draft-tp", str(draft_tp)], ["--target-tp", "1", "--draft-tp", "1"]):
        arguments = command(options, *common, *extra)
        done = subprocess.run(
            [sys.executable, *arguments],
            env=marked(**options.environ),
            capture_output=True,
            text=True,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        document = json.loads(done.stdout)
        found.append([o["token_ids"] for o in document.get("outputs", [])] or document["error"])
    is_equal = found[0] == found[1] and done.returncode == 0
    name = f"tokens at draft TP {draft_tp} {' '.join(how)}"
    return Row(name, done.returncode, 0.0, 0, "" if is_equal else str(found), is_equal)


def rows(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Row]]]:
    last = options.target_tp - 1
    for mode, stage in itertools.product(MODES, ("load", "draft", "verify")):
        for rank in (0, last):
            name = f"{mode}:{stage}:{rank}"
            yield name, lambda m=mode, s=stage, r=rank: failing(options, m, s, r)
    for name in SIGNALS:
        yield f"SIG{name}", lambda n=name: signalled(options, n)
    for draft_tp in (1, options.target_tp):
        yield "tokens", lambda d=draft_tp: equal(options, d)
        yield "tokens", lambda d=draft_tp: equal(options, d, "--temperature", "0.8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, default=8.0, help="run.timeout_s")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--target-tp", type=int, default=2)
    parser.add_argument("--only", default="", help="rows with this in their name")
    options = parser.parse_args()
    gpus = ",".join(map(str, range(options.target_tp)))
    options.environ = {} if options.device == "cpu" else {"CUDA_VISIBLE_DEVICES": gpus}
    print("| what | exit | seconds | left | said |\n|---|---|---|---|---|")
    is_good = True
    for name, measure in rows(options):
        if options.only not in name:
            continue
        row = measure()
        is_good &= row.is_good
        verdict = "" if row.is_good else " **not as promised**"
        cells = [row.name, row.code, f"{row.seconds:.1f}", row.left, row.said + verdict]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
