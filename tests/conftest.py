"""Settings and fixtures for all tests."""

import gc
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import combinations
from typing import Any

# Tiny models gain nothing from threads, and two pools of spinning threads slow two cores down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell's background job ignores SIGINT, and a program under nohup ignores SIGHUP. Programs that a
# test starts would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest
import torch
import typer

# Without a device the kernels run in Triton's interpreter. Every `triton.jit` reads this, even in
# Triton, so it is set before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


from specdec_cli.core.kv_cache import LayerShape
from specdec_cli.engine.memory import budget, estimate
from specdec_cli.models import description, gate

# Machines that are set up by hand for tests on a device may lack these two.
if find_spec("gguf") is None or find_spec("accelerate") is None:
    collect_ignore_glob = ["*/test_gguf*.py"]


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> None:
    """Freeze imported objects: they live to the end, and the collector need not traverse them.

    Transformers imports a model's code when a test first asks for it, so modules before this one
    have imported more.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def thawed_at_the_end() -> Iterator[None]:
    """Let the interpreter free all at its end: libraries tell what is left."""
    yield
    gc.unfreeze()


@pytest.fixture
def steady_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory as it is now: an estimate and a measurement see the same."""
    there = budget.available_memory()
    for module in (budget, estimate):
        monkeypatch.setattr(module, "available_memory", lambda: there)


@pytest.fixture(scope="session", autouse=True)
def probed_once() -> Iterator[None]:
    """Pass a model through the gate once: its trial pass is a third of what a command costs."""
    known: dict[tuple[type, str], list[LayerShape]] = {}

    def probe(model: Any, name: str) -> list[LayerShape]:
        kind = type(model), model.config.to_json_string(use_diff=False)
        if kind not in known:
            known[kind] = gate.probe(model, name)
        return known[kind]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(description, "probe", probe)
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Iterator[None]:
    """Build the parser of the same commands once: that takes half of what a refused one costs."""
    build = typer.main.get_command
    built: dict[tuple[Any, ...], Any] = {}

    def get_command(app: typer.Typer) -> Any:
        key = app, *app.registered_commands
        if key not in built:
            built[key] = build(app)
        return built[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", get_command)
        yield


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
        if "dist" in item.keywords and item.path.parent.name not in ("dist", "launch", "cli"):
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


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn; CUDA only if there is one."""
    return torch.device(request.param)
