"""CPU quotas of control groups bound the number of threads, and their throttling is read."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec_cli.core import control_groups
from specdec_cli.core.control_groups import cpu_quota, throttled_seconds
from specdec_cli.engine.devices import use_few_threads
from specdec_cli.launch import rank, spinning

Write = Callable[[str, str, str], None]


def processors() -> float | None:
    return None if (quota := cpu_quota()) is None else quota.processors


@pytest.fixture(params=[1, 2])
def write(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Write:
    """Write the quota, as cpu.max has it, and the throttled seconds of a group. The process is in
    the group job/step, of either version."""
    version = request.param
    monkeypatch.setattr(control_groups, "_ROOT", str(tmp_path))
    monkeypatch.setattr(control_groups, "_OWN", str(tmp_path / "own"))
    (tmp_path / "own").write_text("0::/job/step\n" if version == 2 else "3:cpu,cpuacct:/job/step\n")

    def write_group(group: str, quota: str, throttled: str) -> None:
        folder = tmp_path / ("" if version == 2 else "cpu") / group
        folder.mkdir(parents=True, exist_ok=True)
        if version == 2:
            (folder / "cpu.max").write_text(f"{quota}\n")
            (folder / "cpu.stat").write_text(
                f"usage_usec 9000000\nthrottled_usec {throttled}000000\n"
            )
        else:
            most, _, period = quota.replace("max", "-1").partition(" ")
            (folder / "cpu.cfs_quota_us").write_text(f"{most}\n")
            (folder / "cpu.cfs_period_us").write_text(f"{period}\n")
            (folder / "cpuacct.usage").write_text("9000000000\n")
            (folder / "cpu.stat").write_text(f"nr_periods 9\nthrottled_time {throttled}000000000\n")

    return write_group


def test_the_quotas_of_all_groups_above_a_process_count(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert processors() is None and throttled_seconds() is None and rank.num_cores() == 16
    write("job/step", "max 100000", "0")
    assert processors() is None and throttled_seconds() == 0 and rank.num_cores() == 16
    write("job", "600000 100000", "4")
    assert processors() == 6 and throttled_seconds() == 4 and rank.num_cores() == 6
    write("job/step", "175000 50000", "3")
    write("", "3200000 100000", "0")
    assert processors() == 3.5 and throttled_seconds() == 7
    assert rank.num_cores() == 3, "a fourth thread would be throttled"
    write("job", "200000 100000", "4")
    assert rank.num_cores() == 2
    write("job/step", "25000 50000", "3")
    assert rank.num_cores() == 1


def test_other_work_uses_the_processors_beyond_a_quota_first(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host of 16 processors, of which other work uses 12, has 4 left for a quota of 4 or 6."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(spinning, "in_use", lambda: spinning.Use(100.0, 1212.0, 12.0))
    monkeypatch.setattr(spinning, "_BEGAN", spinning.Use(99.0, 1200.0, 12.0))
    for quota, used in (("max", 12), ("600000", 2), ("400000", 0)):
        write("job", f"{quota} 100000", "0")
        spinning.others.cache_clear()
        assert spinning.others() == used
    spinning.others.cache_clear()


def test_other_work_of_the_group_uses_its_quota(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """15 of 16 processors are free, but the group may use only 4, of which other work uses one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    write("job", "400000 100000", "0")
    began = spinning.in_use()
    assert began is not None and began.group == 9
    monkeypatch.setattr(spinning, "_BEGAN", spinning.Use(99.0, 1200.0, 12.0, began.group))
    monkeypatch.setattr(spinning, "in_use", lambda: spinning.Use(100.0, 1202.0, 13.0, 11.0))
    spinning.others.cache_clear()
    assert spinning.others() == 1
    spinning.others.cache_clear()


def test_a_large_model_keeps_to_a_quota(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch begins with a thread for each processor, whether or not other work is known."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    before = torch.get_num_threads()
    for others in (0.0, None):
        monkeypatch.setattr(spinning, "others", lambda others=others: others)
        write("job", "300000 100000", "0")
        try:
            torch.set_num_threads(5)
            assert use_few_threads(torch.device("cpu"), 2**30) is None
            assert torch.get_num_threads() == 3
        finally:
            torch.set_num_threads(before)
