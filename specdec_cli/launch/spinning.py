"""The time that torch's threads on a CPU spin while they wait for each other.

It is chosen before torch starts, since libgomp reads it when it is loaded.

A product of a small model takes less time than it takes to wake a thread, so libgomp's threads spin
between products, for milliseconds by default. Beside other work a thread that spins uses its time
up and then has to wait for a processor, and every product waits for it: tokens take five times as
long, or fifty (docs/performance.md, CPU). Few spins cost a tenth on a machine that nobody else
uses, so the number follows from what other work used while this process started.
"""

import os
import time
from contextlib import suppress
from typing import NamedTuple

from specdec_cli.launch.rank import num_cores

SPINS = "GOMP_SPINCOUNT"
_POLICY = "OMP_WAIT_POLICY"
_ALONE, _CROWDED = 20_000, 100  # spins; libgomp's own default is 300,000
_OTHERS = 0.3  # processors that other work may use of those that torch's threads need
_WINDOW = 0.25  # least seconds to see other work in


class Use(NamedTuple):
    """Processor seconds: on the clock, of all processes, and of this one and its children."""

    clock: float
    all: float
    own: float


def in_use() -> Use | None:
    """The machine's use of processors so far; None where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/stat", encoding="ascii") as stat:
            user, nice, system, _, _, irq, softirq, steal = map(int, stat.readline().split()[1:9])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return Use(time.monotonic(), busy, sum(os.times()[:4]))
    return None


_BEGAN = in_use()


def choose_spins() -> None:
    """Set the number of spins, unless the user has chosen one, or one thread. Call it before torch
    is imported, or processes are started that import it."""
    threads = _threads()
    if threads == 1 or {SPINS, _POLICY} & os.environ.keys() or _BEGAN is None:
        return
    if (left := _WINDOW - (time.monotonic() - _BEGAN.clock)) > 0:
        time.sleep(left)
    if (now := in_use()) is not None:
        os.environ[SPINS] = str(spins_for(_BEGAN, now, threads, os.cpu_count() or 1))


def spins_for(began: Use, now: Use, threads: int, cores: int) -> int:
    """The number of spins by the use of `cores` processors meanwhile."""
    others = (now.all - began.all - (now.own - began.own)) / (now.clock - began.clock)
    return _CROWDED if others > cores - min(threads, cores) + _OTHERS else _ALONE


def told(threads: int) -> str:
    """The choice, for the record of a run's environment."""
    if threads == 1:
        return "none: one thread"
    set_ones = [f"{name}={os.environ[name]}" for name in (_POLICY, SPINS) if name in os.environ]
    return ", ".join(set_ones) or "by default"


def _threads() -> int:
    """Threads that torch will use, at most."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if (chosen := os.environ.get(name, "")).isdigit():
            return int(chosen)
    return num_cores()
