"""Plants one-line faults into a copy of the code, and reports those that no test near them finds.

    python scripts/proofs/mutants.py [--only 'specdec_cli/engine/*'] [--jobs 1] [--list] [--check]

The faults are in `scripts/proofs/faults`, with a file for each part of the code. Each fault names
tests; those that CI runs are used. One of them has to fail with the fault, and has to pass without
it. Results are kept in a file by fault, code and tests, so that an interrupted run can continue,
and a changed test runs again. Exits 1 if a fault survives or cannot be planted. --check runs no
tests: it names modules without a fault, and faults that no longer fit the code.
"""

import argparse
import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from multiprocessing import current_process, get_context
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from scripts.proofs.faults.check import misfits, modules_without  # noqa: E402
from scripts.proofs.faults.fault import Fault, all_faults  # noqa: E402

LIMIT_S = 240.0  # a fault may make a loop endless, which counts as found
LIMIT_BYTES = 8 * 2**30  # of data, since a fault may fill the memory
# Modules that tests import besides the code. A forked process has them at once.
HEAVY = (
    *("torch", "torch.distributed", "torch._dynamo", "triton.language", "numpy", "pytest"),
    *("transformers", "transformers.generation", "transformers.models.llama.modeling_llama"),
    *("transformers.models.auto.modeling_auto", "safetensors.torch", "tokenizers", "pydantic"),
    *("hypothesis", "typer", "rich.table", "yaml", "jinja2", "datasets", "matplotlib.figure"),
)
SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_INTERPRET": "1",
}


def copied(folder: Path) -> Path:
    """Make a copy of the files that git knows or would add."""
    named = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(named, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of pytest. told: "passed", "failed" or other words. failed: the test that failed."""

    told: str
    seconds: float
    failed: str | None = None


def run_tests(tree: Path, tests: Sequence[str]) -> Ended:
    """Run some tests in a tree, up to the first failure."""
    began = time.monotonic()
    failed = tree / "failed.txt"
    failed.write_text("")
    if (pid := os.fork()) == 0:
        os.setsid()
        _be_pytest(tree, tests, failed)
    ended, status = 0, 0
    while not ended and time.monotonic() < began + LIMIT_S:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    code = -1
    if ended:
        code = os.waitstatus_to_exitcode(status)
    else:
        os.waitpid(pid, 0)
    # A fault may end the process, or keep it from ending.
    told = {0: "passed", 1: "failed", 5: "no tests"}.get(code, "failed" if code < 0 else "broken")
    return Ended(told, time.monotonic() - began, failed.read_text() or None)


def _be_pytest(tree: Path, tests: Sequence[str], failed: Path) -> NoReturn:
    """Run pytest in this forked process, to its end."""
    os.chdir(tree)
    os.environ["PYTHONPATH"] = f"{tree}{os.pathsep}{tree / 'kernels'}"
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, resource.RLIM_INFINITY))
    current_process()._config["daemon"] = False  # a pool's is not, and tests start processes
    sys.dont_write_bytecode = True
    sys.path[:] = [str(tree), str(tree / "kernels"), *(p for p in sys.path if p != str(ROOT))]

    class Noted:
        @staticmethod
        def pytest_runtest_logreport(report: Any) -> None:
            if report.failed and not failed.read_text():
                failed.write_text(report.nodeid)

    code = 2
    with (tree / "pytest.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            import pytest

            chosen = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
            code = int(pytest.main([*chosen, *tests], plugins=[Noted()]))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault's outcome. seconds: the time of its tests with it. by: the test that found it."""

    fault: Fault
    told: str
    seconds: float
    by: str | None = None


class Planter:
    """Plants faults in a copy of the tree, one at a time. clean: the results of tests without a
    fault."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.clean: dict[tuple[str, ...], str] = {}

    def plant(self, fault: Fault) -> Planted:
        """Plant a fault, run its tests and take it out again. Returns the outcome."""
        file = self.tree / fault.file
        whole = file.read_text()
        try:
            planted = fault.planted(whole)
        except ValueError as problem:
            return Planted(fault, str(problem), 0.0)
        try:
            file.write_text(planted)
            found = run_tests(self.tree, fault.tests)
        finally:
            file.write_text(whole)
        told = {"failed": "killed", "passed": "survived"}.get(found.told, found.told)
        if told == "killed":
            tests = (found.failed,) if found.failed else fault.tests
            if tests not in self.clean:
                self.clean[tests] = run_tests(self.tree, tests).told
            if self.clean[tests] != "passed":
                told = f"{tests[0]} {self.clean[tests]} without it"
        return Planted(fault, told, found.seconds, found.failed)


_planters: list[Planter] = []  # this process's planter


def _get_ready(scratch: str) -> None:
    _planters.append(Planter(copied(Path(scratch, str(os.getpid())))))


def _plant(fault: Fault) -> Planted:
    return _planters[0].plant(fault)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="*", metavar="GLOB", help="files or faults: '*/engine/*'")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="only show the faults")
    parser.add_argument("--check", action="store_true", help="only hold the list against the code")
    results = Path(tempfile.gettempdir(), "mutants.jsonl")
    parser.add_argument("--results", type=Path, default=results)
    args = parser.parse_args()
    if args.check:
        every = all_faults()
        lacking = [f"{module}: no fault" for module in modules_without(every, ROOT)]
        for told in (found := [*lacking, *misfits(every, ROOT)]):
            print(told)
        return 1 if found else 0
    faults = [f for f in all_faults() if fnmatch(f.file, args.only) or fnmatch(f.name, args.only)]
    if not faults:
        parser.error(f"no fault fits --only {args.only!r}: give a file or a pattern, '*/engine/*'")
    if args.list:
        for fault in faults:
            print(f"{fault.name}{fault.change}")
        return 0
    os.environ |= SETTINGS
    for name in HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    keys = {fault.name: fault.key(ROOT) for fault in faults}
    known: dict[str, tuple[str, float]] = {}
    if args.results.exists():
        lines = map(json.loads, args.results.read_text().splitlines())
        known = {line["key"]: (line["outcome"], line["seconds"]) for line in lines}
    found = {f.name: known[keys[f.name]] for f in faults if keys[f.name] in known}
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as scratch,
        get_context("fork").Pool(args.jobs, _get_ready, (scratch,)) as pool,
        args.results.open("a") as file,
    ):
        left = [fault for fault in faults if fault.name not in found]
        for one in pool.imap_unordered(_plant, left):
            name, told, seconds = one.fault.name, one.told, round(one.seconds, 2)
            found[name] = told, seconds
            if told in ("killed", "survived"):
                line = {"key": keys[name], "outcome": told, "seconds": seconds}
                file.write(json.dumps(line | {"name": name, "by": one.by}) + "\n")
                file.flush()
            change = "" if told == "killed" else one.fault.change
            print(f"{told:10} {seconds:6.1f} s  {name}{change}", flush=True)
    return report(found, time.monotonic() - began)


def report(found: dict[str, tuple[str, float]], took: float) -> int:
    """Print the outcomes by room. Returns the exit code."""
    rooms: dict[str, Counter[str]] = {}
    for name, (told, _) in found.items():
        room = "/".join(name.split("/")[1:-1]) or "specdec_cli"
        word = told if told in ("killed", "survived") else "not tried"
        rooms.setdefault(room, Counter())[word] += 1
    print(f"\n{'room':32} {'faults':>6} {'killed':>6} {'survived':>8}")
    for room, counts in sorted(rooms.items()):
        numbers = f"{counts.total():6} {counts['killed']:6} {counts['survived']:8}"
        print(f"{room:32} {numbers}")
    whole = sum(rooms.values(), Counter[str]())
    seconds = [seconds for _, seconds in found.values()] or [0.0]
    print(
        f"{whole.total()} faults, {whole['killed']} killed, {whole['survived']} survived, "
        f"{whole['not tried']} not tried; {statistics.median(seconds):.1f} s a fault (median), "
        f"{max(seconds):.1f} s at most; this run took {took / 60:.0f} minutes"
    )
    return 0 if whole["killed"] == whole.total() else 1


if __name__ == "__main__":
    sys.exit(main())
