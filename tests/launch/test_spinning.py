"""Threads of torch and their spins follow from what other work used as the process began."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_cli.engine.devices import use_few_threads
from specdec_cli.launch import spinning
from specdec_cli.launch.spinning import (
    Use,
    choose_spins,
    in_use,
    spins_for,
    threads_beside,
    used_by_others,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("used", "own", "threads", "cores", "is_crowded"),
    [
        (0.5, 0.5, 2, 2, False),  # nobody else
        (0.6, 0.5, 2, 2, False),  # a little
        (1.0, 0.5, 2, 2, True),  # one processor of two, for half of the second
        (2.0, 0.1, 2, 2, True),  # hogs
        (7.5, 0.5, 2, 16, False),  # nine are free, of which two are needed
        (7.5, 0.5, 12, 16, True),
        (1.5, 0.5, 64, 16, True),  # more threads than processors
    ],
)
def test_spins_by_use(used: float, own: float, threads: int, cores: int, is_crowded: bool) -> None:
    began = Use(100.0, 5000.0, 2.0)
    now = Use(101.0, 5000.0 + used, 2.0 + own)
    use = used_by_others(began, now)
    assert spins_for(use, threads, cores) == (100 if is_crowded else 20_000)
    # The same rates over half a second.
    half = Use(100.5, 5000.0 + used / 2, 2.0 + own / 2)
    assert used_by_others(began, half) == pytest.approx(use)


@pytest.mark.parametrize(
    ("use", "cores", "threads"),
    [
        (0.0, 2, 2),
        (0.3, 2, 2),
        (1.0, 2, 1),  # one is free
        (1.2, 2, 2),  # none is: two hogs, and this process
        (0.5, 1, 1),
        (4.0, 16, 12),
        (15.5, 16, 16),
    ],
)
def test_threads_by_use(use: float, cores: int, threads: int) -> None:
    assert threads_beside(use, cores) == threads


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity")
def test_other_processors_do_not_matter() -> None:
    """The use of one processor is less than that of two."""
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2 or in_use() is None:
        pytest.skip("one processor")
    seen = []
    for index in mine[:2]:
        os.sched_setaffinity(0, {index})
        try:
            seen.append(in_use())
        finally:
            os.sched_setaffinity(0, mine)
    whole = in_use()
    assert whole is not None and all(one is not None and one.all < whole.all for one in seen)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(spinning, "num_cores", lambda: 4)
    monkeypatch.setattr(spinning, "_BEGAN", Use(0.0, 0.0, 0.0))
    measured = spinning.others
    measured.cache_clear()
    yield monkeypatch
    measured.cache_clear()


@pytest.mark.parametrize(
    ("name", "value"),
    [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active"), ("OMP_NUM_THREADS", "1")],
)
def test_what_the_user_set_stays(bare: pytest.MonkeyPatch, name: str, value: str) -> None:
    bare.setenv(name, value)
    choose_spins()
    assert os.environ.get("GOMP_SPINCOUNT") == (value if name == "GOMP_SPINCOUNT" else None)
    told = "by default" if name == "OMP_NUM_THREADS" else f"{name}={value}"
    assert spinning.told(2) == told and spinning.told(1) == "none: one thread"


def test_an_unknown_machine_is_left_alone(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(spinning, "_BEGAN", None)
    choose_spins()
    assert "GOMP_SPINCOUNT" not in os.environ


def test_the_system_s_own_figures(bare: pytest.MonkeyPatch) -> None:
    """Own work counts for this process, and no less in all."""
    began = in_use()
    if began is None:
        pytest.skip("no /proc/stat")
    sum(i * i for i in range(400_000))
    now = in_use()
    assert now is not None and now.own > began.own and now.clock > began.clock
    assert now.all - began.all >= now.own - began.own - 0.03  # ticks of a hundredth
    choose_spins()
    assert os.environ["GOMP_SPINCOUNT"] in ("100", "20000")
    assert spinning.told(2) == f"GOMP_SPINCOUNT={os.environ['GOMP_SPINCOUNT']}"


@pytest.mark.parametrize(("chosen", "threads"), [(None, 1), ("3", 5)])
def test_a_large_model_runs_on_the_threads_that_are_free(
    bare: pytest.MonkeyPatch, chosen: str | None, threads: int
) -> None:
    """A user's number stays, and so does the number of ranks. A GPU needs no threads."""
    bare.setattr(spinning, "others", lambda: 1.0)
    bare.setattr("specdec_cli.engine.devices.num_cores", lambda: 2)
    if chosen is not None:
        bare.setenv("OMP_NUM_THREADS", chosen)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        assert use_few_threads(torch.device("cuda"), 2**30) is None
        assert torch.get_num_threads() == 5
        found = use_few_threads(torch.device("cpu"), 2**30)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert (found is None) == (chosen is not None)
    assert found is None or (found.code == "few_threads" and "--threads 2" in found.message)


def test_a_command_chooses_before_torch_and_records_it(tmp_path: Path) -> None:
    """libgomp prints its settings when it is loaded."""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    env |= {"OMP_DISPLAY_ENV": "verbose", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    line = [sys.executable, "-m", "specdec_cli", "generate", "--prompt", "x", "--json", "-k", "0"]
    done: Any = subprocess.run(
        [*line, "--max-new-tokens", "1", "--device", "cpu"],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch runs on another library for threads")
    shown = done.stderr.partition("GOMP_SPINCOUNT = '")[2].partition("'")[0]
    assert shown in ("100", "20000") or os.cpu_count() == 1
    # The demo pair is so small that it runs on one thread.
    assert json.loads(done.stdout)["environment"]["thread_spins"] == "none: one thread"


def test_training_chooses_before_torch() -> None:
    """A step beside other work took ten times as long without it."""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    told = (
        "import os, sys, scripts.speculators; "
        "print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    )
    line = [sys.executable, "-c", told]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=100, check=True)
    spins = ("None",) if os.cpu_count() == 1 or in_use() is None else ("100", "20000")
    assert done.stdout.split() in [["False", number] for number in spins]
