"""Runs `specdec sweep-k` and `specdec merge` in tests, and kills them.

The proof script `scripts/proofs/kills.py` uses this too.
"""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_cli.app import main
from specdec_cli.core.figures import Rate, Record
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.load.arrivals import MEASURED, Process, gaps
from tests.cli.generate_helpers import Result

Sample = dict[str, Any]
TIMES = {
    *("seconds", "decode_seconds", "round_share", "stage_ms"),
    *("ttft_ms", "ttft_parts_ms", "tpot_ms"),
}


def specdec(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Result:
    """Run `specdec ARGUMENTS` in this process."""
    capsys.readouterr()
    code = main(list(map(str, arguments)))
    captured = capsys.readouterr()
    return Result(code, captured.out, captured.err)


def gain(point: dict[str, Any]) -> float:
    """A point's ratio of speeds, also one that is impossible: a first run is slow by much."""
    found = point["speedup"] if point["speedup"] is not None else point["impossible_speedup"]
    assert isinstance(found, float)
    return found


def samples(folder: Path) -> list[Sample]:
    """The records of samples.jsonl; fails if a line is not whole."""
    text = (folder / "samples.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def without_times(found: list[Sample]) -> list[Sample]:
    """Samples in the order of point and prompt, without times."""
    drop = TIMES | {"peak_memory_bytes"}
    kept = [{k: v for k, v in s.items() if k not in drop} for s in found]
    return sorted(kept, key=lambda s: (str(s["draft"]), s["batch_size"], s["k"], s["index"]))


@contextmanager
def sweep_process(arguments: list[str | Path]) -> Iterator[tuple[int, int]]:
    """Run `specdec ARGUMENTS` in a fork of this process, which has loaded torch.

    Returns its id, and a pipe with a line for every record that was acknowledged as written.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.close(reading)
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            torch.set_num_threads(1)
            append = RunFolder.append

            def acknowledged(self: RunFolder, name: str, *records: Record) -> None:
                append(self, name, *records)
                for record in records if name == "samples.jsonl" else ():
                    line = record.as_dict()
                    key = [line[field] for field in ("draft", "batch_size", "k", "index")]
                    os.write(writing, (json.dumps(key) + "\n").encode())

            RunFolder.append = acknowledged  # type: ignore[method-assign]
            code = main(list(map(str, arguments)))
        finally:
            os._exit(code)
    os.close(writing)
    try:
        yield child, reading
    finally:
        os.close(reading)


def stopped_sweep(
    arguments: list[str | Path], seconds: float, number: int, after: int = 0
) -> tuple[int, list[list[Any]]]:
    """Run a sweep and send it signal `number` some time after its record `after`.

    Returns its end (an exit code, or minus the signal) and the keys of the samples that were
    acknowledged as written.
    """
    told = b""
    with sweep_process(arguments) as (child, pipe):
        deadline: float | None = time.monotonic() + seconds if after == 0 else None
        while True:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([pipe], [], [], wait)
            if ready:
                piece = os.read(pipe, 65536)
                told += piece
                if not piece:  # it ended by itself
                    break
                if deadline is None and told.count(b"\n") >= after:
                    deadline = time.monotonic() + seconds
            elif deadline is not None and time.monotonic() >= deadline:
                os.kill(child, number)
                deadline = time.monotonic() + 3600
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, [json.loads(line) for line in told.split(b"\n")[:-1]]


def lost_or_torn(folder: Path, told: list[list[Any]]) -> tuple[int, int]:
    """Count acknowledged samples that are not in the folder, and torn lines.

    A last line without its end, whose write was not acknowledged, counts as neither.
    """
    path = folder / "samples.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found, torn = [], 0
    for line in lines:
        try:
            record = json.loads(line)
            found.append([record[f] for f in ("draft", "batch_size", "k", "index")])
        except (ValueError, KeyError):
            torn += 1
    return sum(key not in found for key in told), torn


def due_times(process: Process, rate: Rate, count: int, seed: int) -> list[float]:
    """The due times of the measured requests, in seconds."""
    return list(accumulate(islice(gaps(process, rate, seed, MEASURED), count)))
