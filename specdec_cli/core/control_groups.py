"""Reads this process's control groups, of versions 1 and 2. Loading this module imports nothing
heavy."""

from contextlib import suppress
from typing import NamedTuple

_ROOT = "/sys/fs/cgroup"
_OWN = "/proc/self/cgroup"


def folders(controller: str = "") -> list[str]:
    """Return the folders of this process's control group and of all groups above it, since the
    limits of all apply. A process with its own namespace of groups sees only the last one.

    controller: the controller of a hierarchy of version 1; "" for version 2.
    """
    path = ""
    with suppress(OSError), open(_OWN, encoding="utf-8", errors="surrogateescape") as lines:
        fields = [line.rstrip("\n").split(":", 2) for line in lines]  # number, controllers, path
        path = next((f[2] for f in fields if len(f) == 3 and controller in f[1].split(",")), "")
    names = [name for name in path.split("/") if name]
    if ".." in names:  # the group is outside the namespace
        names = []
    root = f"{_ROOT}/{controller}" if controller else _ROOT
    return ["/".join([root, *names[:n]]) for n in range(len(names), -1, -1)]


def number(group: str, file: str, key: str | None = None) -> int | None:
    """Read a number from a file of a control group, such as memory.max.

    group: the folder of the group.
    key: the word before the number, in a file with several; None for a file that holds a single
    number. Return None if the file is missing or has no such number.
    """
    with suppress(OSError, ValueError), open(f"{group}/{file}", encoding="ascii") as lines:
        for line in lines:
            name, _, value = line.strip().rpartition(" ")
            if name == (key or ""):
                return int(value)
    return None


class CpuQuota(NamedTuple):
    """The CPU quota of a control group.

    processors: how many processors its processes may use on average.
    group: its folder.
    """

    processors: float
    group: str

    @property
    def used_seconds(self) -> float | None:
        """The processor time that the group's processes have used so far; None if unknown."""
        if (used := number(self.group, "cpu.stat", "usage_usec")) is not None:
            return used / 1e6
        used = number(self.group, "cpuacct.usage")  # there if one hierarchy has both controllers
        return None if used is None else used / 1e9


def cpu_quota() -> CpuQuota | None:
    """Return the smallest quota of this process's control groups; None if no group has one."""
    found = [(*_quota_2(path), path) for path in folders()]
    for path in folders("cpu"):
        quota, period = (number(path, f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        found.append((quota, period, path))
    known = [CpuQuota(q / period, path) for q, period, path in found if q and period and q > 0]
    return min(known, default=None)


def _quota_2(group: str) -> tuple[int | None, int | None]:
    """Read cpu.max of a group of version 2: a time and the period in which it may be used, in
    microseconds."""
    with suppress(OSError, ValueError), open(f"{group}/cpu.max", encoding="ascii") as file:
        quota, period = map(int, file.read().split())  # the quota is the word max without a limit
        return quota, period
    return None, None


def throttled_seconds() -> float | None:
    """Return for how many seconds the CPU quotas of this process's control groups have stopped
    them, summed over the groups and their processors. Return None if no group tells."""
    found = [(number(path, "cpu.stat", "throttled_usec"), 1e6) for path in folders()]
    found += [(number(path, "cpu.stat", "throttled_time"), 1e9) for path in folders("cpu")]
    known = [count / unit for count, unit in found if count is not None]
    return sum(known) if known else None
