"""Hostile standard streams and environments, and commands that run in them.

Each function returns what is hostile, the command line, and what makes it so in this process.
"""

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

from tests.hostile.commands import SHORT
from tests.hostile.materials import Materials
from tests.hostile.values import DEEP, damaged, deep, encoded, text

Set = tuple[str, list[str], Callable[[], None]]

_VARIABLES: dict[str, list[str]] = {
    "COLUMNS": ["0", "-1", "1", "x", "9" * 30, "", "1000000000"],
    "LINES": ["0", "x", "1"],
    "TERM": ["dumb", "x", "", "xterm\n"],
    "FORCE_COLOR": ["1", "x"],
    "LANG": ["C", "tr_TR.UTF-8", "x"],
    "LC_ALL": ["POSIX", "x"],
    "TMPDIR": ["nowhere", "/dev/null", "n" * 5000, ""],
    "HOME": ["nowhere", "", "/dev/null", "\udcff"],
    "HF_HOME": ["/dev/null", "nowhere", ""],
    "XDG_CACHE_HOME": ["/dev/null", ""],
    "MPLCONFIGDIR": ["/dev/null", "nowhere"],
    "MPLBACKEND": ["x", "TkAgg"],
    "PYTHONWARNINGS": ["error"],
    "SLURM_ARRAY_TASK_ID": ["x", "-1", "9" * 30, "3"],
    "SLURM_ARRAY_TASK_COUNT": ["x", "0", "2", "9" * 30],
    "SLURM_ARRAY_TASK_STEP": ["0", "x"],
    "RANK": ["x", "", "-1", "0"],
    "WORLD_SIZE": ["x", "", "1", "0"],
    "LOCAL_RANK": ["x", "0"],
    "CUDA_VISIBLE_DEVICES": ["x", "-1", "99"],
    "OMP_NUM_THREADS": ["x", "0", "-1"],
    "NO_COLOR": [""],
}


def environment(rng: random.Random, folder: Path, materials: Materials) -> Set:
    """Variables that the command or its libraries read."""
    names = rng.sample(list(_VARIABLES), rng.choice([1, 2, 4]))
    found = {name: rng.choice(_VARIABLES[name]) for name in names}
    run = str(rng.choice(materials.runs))
    command = rng.choice(
        [
            ["generate", "demo", "--prompt", "x", *SHORT],
            ["sweep-k", "demo", "--dry-run", "--device", "cpu"],
            ["report", run, "-o", str(folder / "made")],
            ["profile-blocks", "demo", "--device", "cpu"],
            ["recipe", "ls"],
            ["--help"],
            ["sweep-k", "--help"],
        ]
    )
    return f"{found}"[:100], command, lambda: os.environ.update(found)


def piped(rng: random.Random, folder: Path, materials: Materials) -> Set:
    """Prompts from standard input."""
    lines = b'{"prompt": "x"}\n' * 3
    data = rng.choice(
        [
            *(b"", b"\n", b"\x00" * 1000, b"\xff\xfe\x00x", b"{", b"[" * DEEP, b"\x1f\x8b\x08"),
            *(encoded(text(rng)), encoded(deep(rng).text), b"x\n" * 10_000, b"x" * 10**6),
            *(damaged(lines, rng)[0], b"\xef\xbb\xbf" + lines, lines + b"x\n", b"\r\r\r", b"\x80"),
        ]
    )
    file = folder / "piped"
    file.write_bytes(data)
    command = ["generate", "demo", *SHORT, "--limit", "2"]
    command += rng.choice([[], ["--prompt-file", "-"], ["--skip-bad"], ["--chat"]])
    return f"piped {data[:40]!r}", command, lambda: os.dup2(os.open(file, os.O_RDONLY), 0) and None


def output(rng: random.Random, folder: Path, materials: Materials) -> Set:
    """Standard output or error that is full, closed or cannot be written to."""
    one = rng.choice([1, 2])
    told = rng.choice(["full", "closed", "read only"])
    run = str(rng.choice(materials.runs))
    command = rng.choice(
        [
            ["generate", "demo", "--prompt", "x", *SHORT],
            ["report", run, "-o", str(folder / "made")],
            ["recipe", "ls"],
            ["--help"],
            ["--version"],
        ]
    )

    def set_up() -> None:
        if told == "closed":  # as Python starts then
            os.close(one)
            setattr(sys, "stdout" if one == 1 else "stderr", None)
        else:
            how = os.O_WRONLY if told == "full" else os.O_RDONLY
            os.dup2(os.open("/dev/full", how), one)

    return f"descriptor {one} is {told}", command, set_up
