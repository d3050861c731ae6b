"""Budgets, the split over ranks, and the memory of a host, against hand-computed numbers."""

import resource
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec_cli.core import control_groups
from specdec_cli.engine.memory import budget as profile
from specdec_cli.engine.memory.budget import CacheNeed, Overhead, RankMemory, Split
from specdec_cli.errors import NoRoomError
from specdec_cli.experiment import memory
from specdec_cli.experiment.memory import Profile
from specdec_cli.recipe import CacheSection
from specdec_cli.terminal.memory import PARTS, answers, cells, print_profile

GIB = 2**30
RANK = RankMemory(
    rank=0,
    device="cuda:0",
    total_bytes=80 * GIB,
    target_weight_bytes=35 * GIB,
    draft_weight_bytes=16 * GIB,
    activation_bytes=1 * GIB,
    graph_bytes=1 * GIB,
    other_bytes=1 * GIB,
    kv_budget_bytes=18 * GIB,
    target_block_bytes=3 * 2**20,
    draft_block_bytes=2**20,
)
IDLE = replace(RANK, rank=1, draft_weight_bytes=0, kv_budget_bytes=34 * GIB, draft_block_bytes=0)


def test_the_rank_with_the_fewest_blocks_decides_and_the_rest_is_stranded() -> None:
    split = Split((IDLE, RANK))
    assert RANK.fits == 18 * 1024 // 4 == 4608
    assert IDLE.fits == 34 * 1024 // 3 == 11605
    assert (split.num_blocks, split.limiting) == (4608, RANK)
    assert split.stranded_bytes(RANK) == 0
    assert split.stranded_bytes(IDLE) == 34 * GIB - 4608 * 3 * 2**20


def test_rows_add_up_to_the_total() -> None:
    assert RANK.held_bytes + RANK.kv_budget_bytes + RANK.free_bytes == RANK.total_bytes
    assert RANK.free_bytes == 8 * GIB


def allowed(utilization: float, cpu_bytes: int | None) -> CacheSection:
    return CacheSection(gpu_memory_utilization=utilization, cpu_bytes=cpu_bytes)


@pytest.mark.parametrize(
    ("utilization", "gib"), [(0.9, 72 - 51 - 3), (1.0, 80 - 51 - 3), (0.5, 0)], ids=str
)
def test_a_gpu_budget_is_what_all_else_leaves_of_the_part_that_may_be_used(
    utilization: float, gib: int
) -> None:
    overhead = Overhead(80 * GIB, activation_bytes=GIB, graph_bytes=GIB, other_bytes=GIB)
    assert profile.gpu_budget(allowed(utilization, None), overhead, 51 * GIB) == gib * GIB


def test_a_host_is_divided_by_its_ranks() -> None:
    assert profile.host_budget(allowed(0.9, None), 1000, 4) == 125
    assert profile.host_budget(allowed(0.9, 1000), 7, 4) == 250


@pytest.mark.parametrize("blocks", [0, 1])
def test_no_room_is_told_with_the_numbers(blocks: int) -> None:
    rank = replace(RANK, kv_budget_bytes=blocks * RANK.block_bytes + 1)
    with pytest.raises(NoRoomError) as refused:
        Split((IDLE, replace(rank, rank=1, device="cuda:1"))).check(16)
    message = refused.value.message
    assert f"rank 1 (cuda:1): {blocks * 4}.0 MiB are left" in message
    for number in ("4.0 MiB", "81,920.0 MiB", "35,840.0 (target)", "16,384.0 (draft)"):
        assert number in message
    Split((IDLE,)).check(16)


def test_a_sequence_needs_room_for_two_rounds() -> None:
    need = CacheNeed(batch_size=3, longest=100, k=4, block_size=16)
    assert need.blocks_per_sequence == 7  # 110 tokens
    assert need.num_blocks == 22


def test_a_control_group_limits_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(control_groups, "_ROOT", str(tmp_path))
    monkeypatch.setattr(control_groups, "_OWN", str(tmp_path / "none"))
    whole = profile.total_memory()
    (tmp_path / "memory.max").write_text("max\n")
    assert profile.total_memory() == whole
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100\nactive_file 50\n")
    assert profile.total_memory() == 1000
    assert profile.available_memory() == 400, "files that nobody needs can go"


@pytest.mark.parametrize(
    ("own", "total", "available"),
    [
        ("0::/slurm/job_1/step_0\n", 800, 250),  # the job's limit, and the step's rest
        ("9:name=systemd:/\n0::/slurm/job_1\n", 800, 400),
        ("0::/slurm\n", 2000, 1900),
        ("0::/slurm/job_1/gone\n", 800, 400),  # a group that the process does not see
        ("0::/\n", 2000, 1900),
        ("0::/../slurm/job_1\n", 2000, 1900),
    ],
    ids=["step", "job", "service", "hidden", "root", "outside"],
)
@pytest.mark.parametrize("version", [1, 2])
def test_the_limits_of_all_groups_above_a_process_count(
    version: int,
    own: str,
    total: int,
    available: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Slurm limits a job and its steps, and the process sees the groups of the whole host."""
    names, mount = ("max", "current", "inactive_file"), ""
    if version == 1:
        own = own.replace("0::", "4:hugetlb,memory:")
        names, mount = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"), "memory"
        (tmp_path / "fs").mkdir()
    monkeypatch.setattr(control_groups, "_ROOT", str(tmp_path / "fs"))
    monkeypatch.setattr(control_groups, "_OWN", str(tmp_path / "own"))
    (tmp_path / "own").write_text(own)
    (tmp_path / "memory.max").write_text("7\n")  # outside the groups
    groups = {
        "": ("2000", 100, 0),
        "slurm": ("max", 900, 0),
        "slurm/job_1": ("800", 600, 200),
        "slurm/job_1/step_0": ("900", 700, 50),
    }
    for name, (limit, used, inactive) in groups.items():
        group = tmp_path / "fs" / mount / name
        group.mkdir()
        (group / f"memory.{names[0]}").write_text(f"{limit}\n")
        (group / f"memory.{names[1]}").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\n{names[2]} {inactive}\n")
    assert (profile.total_memory(), profile.available_memory()) == (total, available)


def test_a_limit_on_virtual_memory_bounds_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    least = replace(RANK, device="cpu", kv_budget_bytes=0)
    for limit, is_told in ((held + 2**27, True), (2**60, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        with pytest.raises(NoRoomError) as refused:
            Split((least,)).check(16)
        assert ("ulimit -v" in (refused.value.hint or "")) == is_told
        with pytest.raises(NoRoomError) as refused:
            Split((least,), is_limit=True).check(16)
        assert "ulimit -v" not in (refused.value.hint or "")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (held + 2**27, 2**60))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert profile.total_memory() == 2 * (held + 2**27)
    assert 0 < profile.available_memory() <= 2**28


def test_a_cpu_budget_is_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "available_memory", lambda: 600)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    overhead = Overhead(10, 10**9, 0, 10**9)
    cpu = torch.device("cpu")
    assert profile.kv_budget(allowed(0.9, None), cpu, overhead, 7) == 150
    assert profile.kv_budget(allowed(0.1, 500), cpu, overhead, 7) == 250


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "file"])
@pytest.mark.parametrize("columns", [40, 80])
def test_figures_of_many_ranks_are_not_cut(
    columns: int,
    is_terminal: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle = replace(IDLE, kv_budget_bytes=34 * GIB + 123456, activation_bytes=571 * 2**20)
    split = Split((RANK, *(replace(idle, rank=rank) for rank in range(1, 8))))
    ranks = [
        asdict(r)
        | {"num_blocks": 100 * r.fits, "free_bytes": 0, "stranded_bytes": split.stranded_bytes(r)}
        for r in split.ranks
    ]
    point = {"draft_tp": 1, "k": 5, "block_size": 16, "gpu_memory_utilization": 0.9}
    point |= {"status": "ok", "num_blocks": 460800, "max_tokens": 7372784, "max_sequences": 1755}
    point |= {"limiting_rank": 0}
    document = {"ranks": ranks, "num_blocks": 4608, "block_size": 16, "method": "estimated"}
    document |= {"max_tokens": 73712, "max_sequences": 17, "limiting_rank": 0, "context": 4096}
    document |= {
        "fit": {"batch_size": 1, "fits": True, "needed_blocks": 258, "recipe_blocks": None},
        "draft_cost": None,
    }
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    print_profile(document | {"points": [point]})
    shown = capsys.readouterr().out
    assert "…" not in shown and "activations " in shown
    assert shown.count("1,160,500") == 7 and "7,372,784" in shown
    assert is_terminal or shown.count("571.00 MiB") == 7


def test_what_is_stranded_is_what_the_other_ranks_cannot_use() -> None:
    """On the rank with the least room a part of a block is left unused."""
    ranks = [{"rank": i, "stranded_bytes": n * 2**20} for i, n in enumerate((5, 1, 7))]
    document = {"ranks": ranks, "limiting_rank": 1, "num_blocks": 9, "block_size": 16}
    document |= {"method": "measured", "max_tokens": 128, "max_sequences": 1, "context": 100}
    document |= {"draft_cost": None}
    document["fit"] = {"batch_size": 1, "fits": True, "needed_blocks": 8, "recipe_blocks": 9}
    said = answers(document)
    assert said[1] == "Rank 1 has the least room; 12.00 MiB are stranded on the others."
    assert said[2] == "The recipe asks for 9 blocks (cache.num_blocks).", "as many as fit"
    document["fit"] |= {"recipe_blocks": 10}
    assert answers(document)[2].endswith("10 blocks (cache.num_blocks), more than fit.")


@pytest.mark.parametrize(
    "sizes",
    [[5, 3, 0, 0, 10, 2, 0, 1, 4], [1000, 1, 0, 0, 1, 0, 0, 0, 0], [0] * 8 + [7], [1] * 9],
    ids=str,
)
def test_a_bar_is_as_wide_as_it_should_be(sizes: list[int]) -> None:
    names = [name for name, *_ in PARTS]
    found = cells(dict(zip(names, sizes, strict=True)), 72)
    assert sum(found.values()) == 72
    for name, size in zip(names, sizes, strict=True):
        assert abs(found[name] - 72 * size / sum(sizes)) < 2


def test_weights_are_no_other_memory_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "total_memory", lambda: 100)
    monkeypatch.setattr(profile, "available_memory", lambda: 40)
    monkeypatch.setattr(profile, "local_world_size", lambda: 2)
    assert profile.on_host(5, 20) == Overhead(50, 5, 0, other_bytes=30 - 20)
    assert profile.on_host(5, 99).other_bytes == 0


def test_a_gpu_has_the_room_of_a_draft_that_it_does_not_hold() -> None:
    plan: Any = SimpleNamespace(
        device=torch.device("cuda"), recipe=SimpleNamespace(cache=allowed(0.9, None))
    )
    (alone,) = memory._with_draft(Profile(plan, Split((RANK,)), 1), [(0, 0)]).ranks
    assert alone.kv_budget_bytes == (18 + 16) * GIB
    assert (alone.block_bytes, alone.free_bytes) == (3 * 2**20, RANK.free_bytes)


def test_caches_on_a_host_get_half_of_the_room_of_a_draft_that_it_does_not_hold() -> None:
    plan: Any = SimpleNamespace(
        device=torch.device("cpu"), recipe=SimpleNamespace(cache=allowed(0.9, None))
    )
    held = Profile(plan, Split((RANK, IDLE)), 1)
    first, idle = memory._with_draft(held, [(0, 0)] * 2).ranks
    assert first.kv_budget_bytes == (18 + 16 // 2 // 2) * GIB
    assert idle.kv_budget_bytes == (34 + 16 // 2 // 2) * GIB
    plan.recipe.cache = allowed(0.9, 18 * GIB)
    (alone,) = memory._with_draft(Profile(plan, Split((RANK,)), 1), [(0, 0)]).ranks
    assert alone.kv_budget_bytes == RANK.kv_budget_bytes, "the recipe says how many bytes"
