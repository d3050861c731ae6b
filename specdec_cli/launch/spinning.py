"""Chooses the number of torch's CPU threads, and how often a thread spins before it sleeps.

A matmul of a small model takes less time than waking a thread, so threads spin between matmuls. But
if other programs run, a spinning thread uses up its time slice and then waits for a processor, and
every matmul waits for this thread. Tokens then take five or even fifty times as long
(docs/performance.md, CPU). A low number of spins avoids this, but makes an otherwise idle machine a
tenth slower. So both choices depend on how many processors other programs used while this process
started. The number of spins must be chosen before torch is imported, because libgomp reads it only
once, when it is loaded.
"""

import os
import time
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from specdec_cli.core.control_groups import cpu_quota
from specdec_cli.launch.rank import num_allowed, num_cores

SPINS = "GOMP_SPINCOUNT"
_POLICY = "OMP_WAIT_POLICY"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_ALONE, _CROWDED = 20_000, 100  # spins; libgomp's own default is 300,000
_OTHERS = 0.3  # ignore other work that takes at most this many processors from torch's threads
_UNSURE = 0.1  # tolerated error in the measured number of used processors
_WINDOW = 0.25  # minimum time over which other work is measured, in seconds


class Use(NamedTuple):
    """The processor time used up to one moment, in seconds.

    clock: that moment, in seconds on the monotonic clock.
    all: the processor time of all processes.
    own: the processor time of this process and its children.
    group: the processor time of the control group with the CPU quota; None if unknown.
    """

    clock: float
    all: float
    own: float
    group: float | None = None


def in_use() -> Use | None:
    """Read the processor time used so far on the processors that this process may run on. Returns
    None if the system does not report it."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        ours = {f"cpu{index}" for index in os.sched_getaffinity(0)}
        ticks = 0
        with open("/proc/stat", encoding="ascii") as stat:
            for line in stat:
                name, *numbers = line.split()[:9]
                if name in ours:
                    user, nice, system, _, _, irq, softirq, steal = map(int, numbers)
                    ticks += user + nice + system + irq + softirq + steal
        group = None if (quota := cpu_quota()) is None else quota.used_seconds
        seconds = ticks / os.sysconf("SC_CLK_TCK")
        return Use(time.monotonic(), seconds, sum(os.times()[:4]), group)
    return None


_BEGAN = in_use()


@cache
def others() -> float | None:
    """Return how many of `num_cores` processors other work used while this process started; None if
    unknown. Under a CPU quota other work outside the group first uses the processors beyond it."""
    if _BEGAN is None:
        return None
    while time.monotonic() < _BEGAN.clock + _WINDOW:
        pass  # do not sleep: the process must compete for processors, as torch's threads will
    now = in_use()
    if now is None:
        return None
    used = used_by_others(_BEGAN, now) - (num_allowed() - num_cores())
    if _BEGAN.group is None or now.group is None:
        return used
    ends = _BEGAN._replace(all=_BEGAN.group), now._replace(all=now.group)
    return max(used, used_by_others(*ends))


def used_by_others(began: Use, now: Use) -> float:
    """Return the mean number of processors that other work used between the two readings."""
    return (now.all - began.all - (now.own - began.own)) / (now.clock - began.clock)


def choose_spins() -> None:
    """Set the number of spins, unless the user has chosen a number or there is only one thread.
    Call it before torch is imported, and before processes that import torch are started."""
    threads = chosen_threads() or num_cores()
    if threads > 1 and not {SPINS, _POLICY} & os.environ.keys() and (use := others()) is not None:
        threads = threads if chosen_threads() else threads_beside(use, num_cores())
        os.environ[SPINS] = str(spins_for(use, threads, num_cores()))


def chosen_threads() -> int | None:
    """Return the number of torch's threads that the user chose; None if the user chose none."""
    for name in _THREADS:
        if (chosen := os.environ.get(name, "")).isdigit():
            return int(chosen)
    return num_cores() if set(_THREADS) & os.environ.keys() else None


def threads_beside(use: float, cores: int) -> int:
    """Return the number of threads to use while other work uses `use` of `cores` processors.

    If at least half of the processors are free, use one thread for each free one. With more other
    work, use `cores` threads, because many threads get more processor time than few.
    """
    leaves_half = use <= cores / 2 + _UNSURE
    return max(1, round(cores - use)) if _OTHERS < use and leaves_half else cores


def spins_for(use: float, threads: int, cores: int) -> int:
    """Return the number of spins to use while other work uses `use` of `cores` processors."""
    return _CROWDED if use > cores - min(threads, cores) + _OTHERS else _ALONE


def told(threads: int) -> str:
    """Describe the spin setting, for the run's record of its environment."""
    if threads == 1:
        return "none: one thread"
    set_ones = [f"{name}={os.environ[name]}" for name in (_POLICY, SPINS) if name in os.environ]
    return ", ".join(set_ones) or "by default"
