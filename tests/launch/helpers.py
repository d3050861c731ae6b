"""Starts worlds of ranks in tests, and finds processes that they leave behind."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MARK = "SPECDEC_TEST_MARK"


def marked(**extra: str) -> dict[str, str]:
    """A bare environment with a mark, by which `living` finds processes that inherit it."""
    return {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        _MARK: uuid.uuid4().hex,
        **extra,
    }


def living(environ: Mapping[str, str]) -> list[int]:
    """Ids of living processes that were started with `environ`."""
    wanted = f"{_MARK}={environ[_MARK]}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # gone, or not ours
            continue
    return found


def wait_until_gone(environ: Mapping[str, str], seconds: float) -> list[int]:
    """Ids of processes that are still alive after the time; returns early once there are none."""
    deadline = time.monotonic() + seconds
    while (left := living(environ)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def start(program: list[str], environ: Mapping[str, str]) -> "subprocess.Popen[str]":
    """Start `python PROGRAM` with pipes as its output and error streams."""
    return subprocess.Popen(
        [sys.executable, *program],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def worker(*options: str) -> list[str]:
    return ["-m", "tests.launch.worker", "loop", *options]


def torchrun(port: int, *program: str) -> list[str]:
    """The command of one of two torchruns with one rank each, which stand for two hosts."""
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=test"]
    endpoint = f"--rdzv-endpoint=localhost:{port}"
    return ["-m", "torch.distributed.run", *options, endpoint, *program]


def torchrun_alone(num_ranks: int) -> list[str]:
    """Arguments of torchrun on one host; `-m MODULE ...` follows."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]


def pids_of(folder: Path, count: int, seconds: float = 60.0) -> dict[int, int]:
    """The process ids that `count` ranks wrote to a folder, by rank, once all of them have."""
    deadline = time.monotonic() + seconds
    while len(found := os.listdir(folder)) < count:
        assert time.monotonic() < deadline, f"only {found} started"
        time.sleep(0.05)
    return {int(rank): int(pid) for rank, pid in (name.split("-") for name in found)}


def ranks_of(parent: int, count: int, seconds: float = 60.0) -> list[int]:
    """The process ids of a parent's `count` ranks, in order, as soon as these exist."""
    deadline = time.monotonic() + seconds
    found: list[int] = []
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {found} started"
        time.sleep(0.002)
        found = [rank for agent in _children(parent) for rank in _children(agent)]
    return found


def _children(pid: int) -> list[int]:
    """Processes that a process has started, the oldest first."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []
