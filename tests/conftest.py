"""Settings of all tests, and which of their cases CI runs."""

import atexit
import gc
import os
import signal
from collections import Counter, defaultdict
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations

import pytest

# Tiny models gain nothing from threads, and two pools of spinning threads slow two cores down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Imports and collection create what lives to the end. The collector would traverse it many times.
gc.disable()

# A shell's background job ignores SIGINT, and a program under nohup ignores SIGHUP. Programs that a
# test starts would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Machines that are set up by hand for tests on a device may lack these two.
if find_spec("gguf") is None or find_spec("accelerate") is None:
    collect_ignore_glob = ["*/test_gguf*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures, and with them torch, but not where xdist only hands tests to workers.

    A worker has told all before its end, and nobody reads its exit code. So it ends without freeing
    a million objects, after what modules do at its end.
    """
    if hasattr(config, "workerinput"):
        atexit.register(_leave, os.getpid())
    if config.getoption("dist", "no") == "no" or config.getoption("collectonly"):
        config.pluginmanager.register(import_module("tests.fixtures"))


def _leave(worker: int) -> None:
    """End this process at once if it is the worker, not a fork of it."""
    if os.getpid() == worker:
        os._exit(0)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the collector run from here on, but not where nothing but collecting is done.

    Reference counting frees nearly all objects of tests. By default Python looks for reference
    cycles at every 700 new objects, which takes a twentieth of the time.
    """
    if session.config.getoption("collectonly"):
        gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def covering(items: list[pytest.Function], together: int) -> list[pytest.Function]:
    """Some cases of a test in which all values of its parameters occur, as in all cases.

    together: every so many values of different parameters occur in one case, 1 or 2.
    """
    meetings = {}
    for item in items:
        values = [(name, repr(value)) for name, value in sorted(item.callspec.params.items())]
        meetings[item] = {*combinations(values, together), *((value,) for value in values)}
    left = set().union(*meetings.values())
    chosen, seen = [], Counter[pytest.Function]()
    while left:
        # Values that are left meet others in turn, not the first one always.
        best = max(items, key=lambda i: (len(meetings[i] & left), -seen[i] * (together == 1)))
        chosen.append(best)
        left -= meetings[best]
        seen.update(item for item in items if meetings[item] & meetings[best])
    return chosen


# How many values of different parameters meet in the cases that CI runs, by the test's mark.
TOGETHER = {"each_value": 1, "pairwise": 2}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `slow` what a test marked `each_value` or `pairwise` has beside the cases of CI.

    Raises `UsageError` for a test of several processes outside the folders in which `make
    test-ranks` looks for them, and for a case whose id holds an address, which each worker has
    otherwise.
    """
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        is_elsewhere = item.path.parent.name not in ("dist", "launch", "cli", "server")
        if "dist" in item.keywords and is_elsewhere:
            raise pytest.UsageError(f"make test-ranks does not look for {item.nodeid}")
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"name the values of this case: {item.nodeid}")
        here = isinstance(item, pytest.Function) and TOGETHER.keys() & set(item.keywords)
        skipped = any(mark.args[0] for mark in item.iter_markers("skipif"))
        if here and not skipped and "slow" not in item.keywords:
            cases[item.nodeid.split("[")[0]].append(item)
    for of_one in cases.values():
        together = max(n for mark, n in TOGETHER.items() if mark in of_one[0].keywords)
        for item in set(of_one) - set(covering(of_one, together)):
            item.add_marker("slow")
