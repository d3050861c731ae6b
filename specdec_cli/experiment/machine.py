"""Monitors the machine while a run is measured, to detect a CPU or GPU that is shared or slowed.

Readings that the system does not provide are left out.
"""

import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from specdec_cli.core.control_groups import throttled_seconds
from specdec_cli.core.parallel import local_world_size
from specdec_cli.errors import Notice
from specdec_cli.launch.rank import num_cores

_APART = 0.25  # minimum seconds between two readings
_SHORTEST = 3.0  # minimum measured seconds for the limits from `_STARVED` to `_WAITING`
# A shorter measurement of at least `_BRIEF` seconds gets a warning only if a thread was ready to
# run but waited for a processor for more than the share `_STARVED_BRIEFLY` of the time.
_BRIEF, _STARVED_BRIEFLY = 0.4, 0.4
# A measurement of at least `_SHORTEST` seconds gets a warning beyond these limits.
_STARVED = 0.05  # share of the time that this process spent ready to run but not running
_STARVED_HALF = 0.10  # the same, for either half of the measurement
_LEAST_RUNNING = 0.8  # minimum CPU time divided by wall time, for a single rank on a CPU
_THROTTLED = 0.01  # share of the time that the control group was throttled
_WAITING = 0.5  # average number of processes that are ready to run but have no processor
_ALONE = "measure while no other program runs"
# NVML's bits for slowed clocks: hardware slowdown, software thermal, hardware thermal, power brake.
_SLOWED = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}


@dataclass(frozen=True, slots=True)
class _Reading:
    """One reading of the machine. Times are in seconds.

    wall: the time of the reading, from `time.perf_counter`.
    process: the processor time of this process so far.
    waited: how long each thread was ready to run but waited for a processor; empty if unknown.
    throttled: how long the control groups were throttled; None if unknown.
    runnable: the number of processes that are ready to run; None if unknown.
    slowed: NVML's bits for the reasons why clocks are slowed; None if unknown.
    on_gpu: the number of processes on the GPU; None if unknown.
    """

    wall: float
    process: float
    waited: Mapping[int, float]
    throttled: float | None
    runnable: int | None
    slowed: int | None = None
    on_gpu: int | None = None


@dataclass(slots=True)
class MachineWatch:
    """Reads the state of the machine while something is measured. Measuring may pause and begin
    again.

    device: the device of a backend's plan.
    ranks: the number of this run's ranks on this host, which wait for each other and may outnumber
    the processors.
    idles: whether the process sleeps while no request is due, so that its processor time says
    nothing.
    """

    device: Any
    ranks: int = field(default_factory=local_world_size)
    idles: bool = False
    _stretches: list[list[_Reading]] = field(default_factory=list)
    _gpu: Any = None

    def begin(self) -> None:
        """Start a period of measurement, and take its first reading."""
        if self.device.type == "cuda" and self._gpu is None:
            self._gpu = _nvml_device(self.device)
        self._stretches.append([self._read()])

    def look(self, *, at_end: bool = False) -> None:
        """Take a reading, unless the last one is recent. at_end: whether the period of measurement
        ends now, in which case a reading is always taken."""
        stretch = self._stretches[-1]
        if at_end or time.perf_counter() - stretch[-1].wall >= _APART:
            stretch.append(self._read())

    def notices(self) -> list[Notice]:
        """Return warnings about all periods of measurement so far."""
        spans = [pair for s in self._stretches for pair in pairwise(s)]
        wall = sum(b.wall - a.wall for a, b in spans)
        of_gpu = self._gpu_notices()
        if wall < _SHORTEST:
            return [*self._starved_briefly(spans, wall), *of_gpu]
        return [*self._starved(spans, wall), *_throttled(spans, wall), *self._crowded(), *of_gpu]

    def _starved(self, spans: list[tuple[_Reading, _Reading]], wall: float) -> list[Notice]:
        process = sum(b.process - a.process for a, b in spans)
        half = len(spans) // 2
        shares = [_waited(part) for part in (spans, spans[:half], spans[half:])]
        evidence = {"wall_seconds": wall, "process_seconds": process, "waited_share": shares[0]}
        most = max((share for share in shares[1:] if share is not None), default=0.0)
        is_crowd = self.ranks > num_cores()
        if not is_crowd and ((shares[0] or 0.0) > _STARVED or most > _STARVED_HALF):
            whole = shares[0] or 0.0
            is_whole = whole > _STARVED
            share, of = (whole, "the time") if is_whole else (most, "one half of the time")
            told = (
                "other work took the processor: this process was ready to run and waited for "
                f"{100 * share:.0f} % of {of}; {_ALONE}, or set --threads below the free cores"
            )
            return [Notice("cpu_starved", told, evidence | {"waited_share_of_a_half": most})]
        is_alone = self.ranks == 1 and self.device.type == "cpu" and not self.idles
        if is_alone and process / wall < _LEAST_RUNNING:
            told = (
                f"this process ran for {process:.1f} s of {wall:.1f} s: other work, or a limit, "
                f"took the processor; {_ALONE}, or lift the limit"
            )
            return [Notice("cpu_starved", told, evidence)]
        return []

    def _starved_briefly(self, spans: list[tuple[_Reading, _Reading]], wall: float) -> list[Notice]:
        """Return a warning about a short measurement, but only if a thread waited for a large share
        of it."""
        share = _most_waited(spans) / max(wall, 1e-9)
        if self.ranks > 1 or wall < _BRIEF or share <= _STARVED_BRIEFLY:
            return []
        told = (
            f"other work took the processor: a thread of this process waited for {100 * share:.0f} "
            f"% of {wall:.1f} s; {_ALONE}"
        )
        return [Notice("cpu_starved", told, {"wall_seconds": wall, "waited_share": share})]

    def _crowded(self) -> list[Notice]:
        counts = [r.runnable for s in self._stretches for r in s if r.runnable is not None]
        cores = os.cpu_count() or 1
        if len(counts) < 4 or (
            (mean := sum(counts) / len(counts)) <= max(cores, self.ranks) + _WAITING
        ):
            return []
        told = f"{mean:.1f} processes were ready to run on {cores} processors; {_ALONE}"
        return [Notice("cpu_load", told, {"runnable": mean, "processors": cores})]

    def _gpu_notices(self) -> list[Notice]:
        readings = [r for s in self._stretches for r in s]
        found = []
        slowed = [r.slowed for r in readings if r.slowed is not None]
        reasons = sorted({why for bits in slowed for bit, why in _SLOWED.items() if bits & bit})
        if reasons:
            times = sum(any(bits & bit for bit in _SLOWED) for bits in slowed)
            told = (
                f"the GPU's clocks were slowed ({', '.join(reasons)}) in {times} of {len(slowed)} "
                "readings; cool it, or lower its power limit and measure again"
            )
            found.append(Notice("gpu_throttled", told, {"reasons": reasons, "readings": times}))
        others = max((r.on_gpu for r in readings if r.on_gpu is not None), default=1) - 1
        if others > 0:
            which = "process" if others == 1 else "processes"
            told = f"{others} other {which} used the GPU; end them, or take another GPU"
            found.append(Notice("gpu_shared", told, {"other_processes": others}))
        return found

    def _read(self) -> _Reading:
        slowed = on_gpu = None
        if self._gpu is not None:
            with suppress(Exception):  # a driver may not provide one of these readings
                import pynvml

                slowed = int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._gpu))
                on_gpu = len(pynvml.nvmlDeviceGetComputeRunningProcesses(self._gpu))
        return _Reading(
            wall=time.perf_counter(),
            process=time.process_time(),
            waited=_waited_seconds(all_threads=self.device.type == "cpu"),
            throttled=throttled_seconds(),
            runnable=_runnable(),
            slowed=slowed,
            on_gpu=on_gpu,
        )


def _waited(spans: list[tuple[_Reading, _Reading]]) -> float | None:
    """Return the share of the time that the process was ready to run but waited for a processor;
    None if unknown."""
    wall = sum(b.wall - a.wall for a, b in spans)
    if wall < _SHORTEST / 2 or not all(a.waited and b.waited for a, b in spans):
        return None
    return _most_waited(spans) / wall


def _most_waited(spans: list[tuple[_Reading, _Reading]]) -> float:
    """Return the seconds for which the thread that waited longest was ready but did not run. This
    is the time lost, because all threads of a matmul wait for the slowest one."""
    totals = Counter[int]()
    for a, b in spans:
        totals.update({t: s - a.waited[t] for t, s in b.waited.items() if t in a.waited})
    return max(totals.values(), default=0.0)


def _throttled(spans: list[tuple[_Reading, _Reading]], wall: float) -> list[Notice]:
    seconds = sum((b.throttled or 0.0) - (a.throttled or 0.0) for a, b in spans)
    if seconds / wall <= _THROTTLED:
        return []
    told = (
        f"the control group's CPU limit throttled this process for {seconds:.1f} of {wall:.1f} s; "
        "raise its limit, or run fewer threads (--threads)"
    )
    return [Notice("cpu_throttled", told, {"throttled_seconds": seconds, "wall_seconds": wall})]


def _waited_seconds(*, all_threads: bool) -> dict[int, float]:
    """Return for how many seconds each thread was ready to run but waited for a processor, by
    thread id. Without `all_threads`, only the main thread is included."""
    threads = [os.getpid()]
    with suppress(OSError):
        threads = [int(t) for t in os.listdir("/proc/self/task")] if all_threads else threads
    told = {t: _text(f"/proc/self/task/{t}/schedstat").split() for t in threads}
    return {t: int(f[1]) / 1e9 for t, f in told.items() if len(f) > 1 and f[1].isdigit()}


def _runnable() -> int | None:
    """Return the number of runnable processes and threads on the machine, including running ones;
    None if unknown."""
    fields = _text("/proc/loadavg").split()
    count = fields[3].partition("/")[0] if len(fields) > 3 else ""
    return int(count) if count.isdigit() else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


def _nvml_device(device: Any) -> Any:
    """Return the NVML handle of a device; None if pynvml is missing or fails."""
    with suppress(Exception):
        import pynvml
        import torch

        pynvml.nvmlInit()
        found = torch.cuda.get_device_properties(device)
        uuid = getattr(found, "uuid", None)
        if uuid is not None:
            return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)
    return None
