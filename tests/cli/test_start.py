"""The log of a command's start."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from specdec_cli.app import main
from specdec_cli.commands import starting
from specdec_cli.commands.starting import _driver, _start_driver
from specdec_cli.signals import signals
from tests.cli.generate_helpers import command, environment

pytestmark = pytest.mark.usefixtures("small_demo")

SHORT = ("generate", "--prompt", "def add(", "--max-new-tokens", "3")


def test_the_log_names_every_stage_up_to_the_first_token(caplog: pytest.LogCaptureFixture) -> None:
    assert main([*SHORT, "-v"]) == 0
    found = [re.fullmatch(r"([0-9.]+) s: (.+)", line) for line in caplog.messages]
    times = [float(line[1]) for line in found if line]
    stages = [line[2] for line in found if line]
    assert times == sorted(times)
    known = [
        "reading the recipe",
        "describing the target",
        "loading the target",
        "loading the draft",
        "allocating the caches",
        "the first token",
    ]
    assert [stage for stage in stages if stage in known] == known
    assert stages[-1] == "the first token"


def test_without_verbose_no_stage_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert main([*SHORT]) == 0
    assert not caplog.messages


@pytest.mark.parametrize(
    ("device", "fails", "calls"),
    [
        ("cuda:3", None, ["cuInit 0", "cuDeviceGet 3", "cuDevicePrimaryCtxRetain 10"]),
        ("auto", None, ["cuInit 0", "cuDeviceGet 0", "cuDevicePrimaryCtxRetain 10"]),
        ("cuda", "cuInit", ["cuInit 0"]),
        ("cuda:9", "cuDeviceGet", ["cuInit 0", "cuDeviceGet 9"]),
    ],
)
def test_the_context_is_that_of_the_device(
    device: str, fails: str | None, calls: list[str]
) -> None:
    found: list[str] = []

    class Driver:
        def __getattr__(self, name: str) -> Callable[..., int]:
            def call(*arguments: Any) -> int:
                number = arguments[-1]
                found.append(f"{name} {getattr(number, 'value', number)}")
                if name == "cuDeviceGet":
                    arguments[0]._obj.value = 10
                return int(name == fails)

            return call

    _start_driver(Driver(), device)
    assert found == calls


def test_without_a_driver_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started under a memory limit either."""

    def missing(name: str) -> object:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert _driver() is None
    monkeypatch.setattr(ctypes, "CDLL", str)
    assert _driver() == "libcuda.so.1"
    monkeypatch.setattr("resource.getrlimit", lambda _: (2**40, 2**40))
    assert _driver() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_import_of_torch(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in it may abort the process. Two signals then are one."""
    ended: list[bool] = []

    class Torch(Loader):
        def create_module(self, spec: ModuleSpec) -> None: ...

        def exec_module(self, module: ModuleType) -> None:
            for _ in range(2):
                os.kill(os.getpid(), number)
            time.sleep(0.01)
            ended.append(True)

    class Finder:
        def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
            return ModuleSpec(name, Torch()) if name == "torch" else None

    monkeypatch.setattr(starting, "choose_spins", lambda: None)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    for name in ("torch", "transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = signal.getsignal(number)
    with signals(is_last=False) as asked:
        end = KeyboardInterrupt if number == signal.SIGINT else SystemExit
        with pytest.raises(end), starting.importing():
            raise AssertionError("the block runs")
        assert ended and asked == [number]
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("name", ["generate", "sweep-k"])
def test_the_process_that_starts_ranks_imports_neither_the_engine_nor_records(name: str) -> None:
    """It ends here just before it would start ranks, which cannot share the heads."""
    code = (
        "import sys; from specdec_cli.app import main; assert main(sys.argv[1:]) == 2; "
        "found = {'torch', 'transformers', 'numpy', 'specdec_cli.experiment.folders.records'}; "
        "assert not found & sys.modules.keys()"
    )
    line = [command()[0], "-c", code, name, "demo", "--prompt", "x", "--target-tp", "5"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "8 attention heads" in done.stderr, done.stderr


@pytest.mark.parametrize("name", ["generate", "sweep-k"])
def test_memory_is_looked_at_before_anything_heavy_is_imported(name: str) -> None:
    code = (
        "import sys; from specdec_cli.app import main; from specdec_cli.commands import starting; "
        "starting._torch_mib = lambda: 1 << 30; "
        "starting.resource.getrlimit = lambda _: (2**40, 2**40); assert main(sys.argv[1:]) == 5; "
        "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    line = [command()[0], "-c", code, name, "demo", "--prompt", "x"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "torch needs" in done.stderr, done.stderr


def test_records_are_imported_while_the_work_of_others_is_measured() -> None:
    """Before torch this takes a quarter of a second, of which a process would else wait half."""
    code = (
        "import os, sys; from specdec_cli.app import main; "
        "from specdec_cli.commands import starting; "
        "wanted = {'numpy', 'specdec_cli.experiment.folders.records'}; "
        "starting.choose_spins = lambda: os._exit("
        "7 if wanted <= sys.modules.keys() and 'torch' not in sys.modules else 8); "
        "main(sys.argv[1:])"
    )
    line = [command()[0], "-c", code, "generate", "demo", "--prompt", "x"]
    assert subprocess.run(line, env=environment(), check=False).returncode == 7


def test_ranks_share_nearly_everything_that_they_import() -> None:
    """A rank is a fork of its agent, so that what the agent has not imported each rank imports."""
    code = (
        "import gc; gc.disable(); "  # as an agent does for its imports
        "import importlib, sys; from specdec_cli.launch.agent import _SHARED; "
        "[importlib.import_module(name) for name in _SHARED]; shared = set(sys.modules); "
        "from specdec_cli.app import main; assert main(sys.argv[1:]) == 0; "
        "print(*sorted(set(sys.modules) - shared))"
    )
    line = [command()[0], "-c", code, "generate", "--max-new-tokens", "2", "--prompt", "x"]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, check=True)
    own = done.stdout.splitlines()[-1].split()
    assert len(own) < 40 and not [name for name in own if name.partition(".")[0] == "torch"], own
