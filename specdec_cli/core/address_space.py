"""Reads the limit on a process's virtual memory (ulimit -v). Loading this module imports nothing
heavy."""

import resource
from pathlib import Path
from typing import NamedTuple


class AddressSpace(NamedTuple):
    """The limit on a process's virtual memory, and its size now, in bytes."""

    limit: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


def address_space() -> AddressSpace | None:
    """Return this process's limit and its size now. Return None if there is no limit, or if the
    system does not report the size."""
    limit, statm = resource.getrlimit(resource.RLIMIT_AS)[0], Path("/proc/self/statm")
    if limit == resource.RLIM_INFINITY or not statm.exists():
        return None
    return AddressSpace(limit, int(statm.read_text().split()[0]) * resource.getpagesize())
