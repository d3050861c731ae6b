"""Drafts that lie in the target's own files: planned, loaded and run like any other."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.core.types import Permissions, Request
from specdec_cli.engine.build import build
from specdec_cli.engine.plan import Plan, plan, plan_all_ranks
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.recipe import load_recipe
from specdec_cli.recipe.choices.registry import METHODS
from tests.eagle3_pair import PROMPTS, save_pair
from tests.inside import register, save_inside
from tests.support import CPU, greedy_reference, reference, save_noised


@pytest.fixture(autouse=True)
def method() -> Iterator[None]:
    register()
    yield
    del METHODS["inside"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with a draft inside, and that draft in a folder of its own."""
    root = tmp_path_factory.mktemp("inside")
    target = save_pair(root / "pair", steps=0).target  # its head is not used
    draft = save_noised(root / "draft", target)
    save_inside(target, draft)
    return target, draft


def sets_of(target: Path, **more: Any) -> dict[str, Any]:
    return {
        "target.model": str(target),
        "speculation.method": "inside",
        "speculation.num_speculative_tokens": 3,
        "sampling.max_new_tokens": 16,
        "sampling.ignore_eos": True,
        "cache.block_size": 4,
        "run.device": "cpu",
        **{name.replace("__", "."): value for name, value in more.items()},
    }


def planned(target: Path, **more: Any) -> Plan:
    return plan(load_recipe(None, sets_of(target, **more)))


def rounds(found: Plan) -> list[Any]:
    requests = [Request(i, tuple(p)) for i, p in enumerate(PROMPTS)]
    seqs = build(found, 11).run(requests, found.k, found.params).seqs
    return [(s.output_ids, s.accepted_per_round) for s in seqs]


def test_it_runs_as_the_same_draft_of_its_own(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """No warning names its tensors as unused; without the method one does."""
    target, draft = folders
    found = planned(target)
    assert (found.k, found.recipe.proposer, found.recipe.draft) == (3, "inside", None)
    assert found.stages[:2] == ["loading the target", "loading the draft"]
    with caplog.at_level(logging.WARNING, logger="specdec"):
        mine = rounds(found)
        assert "not be used" not in caplog.text
        rounds(planned(target, speculation__method="none"))
        assert "first inside." in caplog.text
    other = {"speculation__method": "draft_model", "draft__model": str(draft)}
    assert mine == rounds(planned(target, **other))
    assert sum(sum(accepted) for _, accepted in mine) > 10
    oracle = reference(target)
    assert [ids for ids, _ in mine] == [greedy_reference(oracle, p, 16) for p in PROMPTS]


def test_its_degree_is_the_target_s(folders: tuple[Path, Path]) -> None:
    sets = sets_of(folders[0], target__tensor_parallel_size=2)
    plans = plan_all_ranks(load_recipe(None, sets), Permissions(), CPU)
    for rank, found in enumerate(plans):
        assert found.draft is not None and found.draft in found.held
        assert (found.draft.parallel.rank, found.draft.parallel.size) == (rank, 2)


def test_k_is_bounded_by_the_draft(folders: tuple[Path, Path]) -> None:
    register(max_k=3)
    assert planned(folders[0]).k == 3
    by_default = sets_of(folders[0])
    del by_default["speculation.num_speculative_tokens"]
    asked = sets_of(folders[0], speculation__num_speculative_tokens=4)
    for sets, is_told in ((asked, r"\(-k\) is 4"), (by_default, r"\(-k\) is 5 by default")):
        with pytest.raises(UsageError, match=rf"{is_told}: .* at most 3 tokens a round") as caught:
            plan(load_recipe(None, sets))
        assert caught.value.code == ExitCode.USAGE and "-k 3" in (caught.value.hint or "")
