"""MTP modules in the target's file: planned, loaded and run, with transformers' own rounds."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specdec_cli.core.types import Request
from specdec_cli.engine.build import build
from specdec_cli.engine.plan import Plan, plan
from specdec_cli.errors import ExitCode, SetupError
from specdec_cli.models.heads.paged import PagedHead
from specdec_cli.recipe import load_recipe
from tests.support import greedy_reference, reference

pytest.importorskip("transformers", minversion="5.23")  # earlier ones have no MTP of their own
from tests.mtp_pair import (
    NEW_TOKENS,
    STARTS,
    expected_rounds,
    mtp_rounds,
    save_mtp,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "one by one": {},
    "refills": {"run.batch_size": 2},
    "chunks": {"run.batch_size": 3, "run.prefill_chunk": 3},
    "preemption": {"run.batch_size": 4, "cache.num_blocks": 17},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mtp(tmp_path_factory.mktemp("mtp") / "target")


def planned(target: Path, k: int = 1, **more: Any) -> Plan:
    sets = {
        "target.model": str(target),
        "draft.model": "mtp",
        "speculation.num_speculative_tokens": k,
        "sampling.max_new_tokens": NEW_TOKENS - 1,
        "sampling.ignore_eos": True,
        "cache.block_size": 4,
        "run.device": "cpu",
    }
    return plan(load_recipe(None, sets | {n.replace("__", "."): v for n, v in more.items()}))


def prompts_of(target: Path) -> list[list[int]]:
    """Those of transformers' rounds, with the token that its first pass decides."""
    oracle = reference(target)
    return [start + greedy_reference(oracle, start, 1) for start in STARTS]


def run(found: Plan, prompts: list[list[int]], k: int | None = None) -> list[Any]:
    engine = build(found, 12)
    requests = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    seqs = engine.run(requests, found.k if k is None else k, found.params).seqs
    assert engine.allocator.num_used == 0
    return seqs


def rounds_of(seq: Any) -> list[tuple[int, int]]:
    return list(zip(seq.proposed_per_round, seq.accepted_per_round, strict=True))


def same_rounds(seq: Any, accepted: list[int]) -> None:
    """transformers tells of a round in the next one; our last may have no room for a proposal."""
    count = len(accepted)
    assert seq.accepted_per_round[:count] == accepted[: len(seq.accepted_per_round)]
    assert abs(count - len(seq.accepted_per_round)) < 2


@pytest.mark.parametrize("case", SETTINGS)
def test_text_and_rounds_are_those_of_transformers(target: Path, case: str) -> None:
    seqs = run(planned(target, **SETTINGS[case]), prompts_of(target))
    found = []
    for seq, start in zip(seqs, STARTS, strict=True):
        tokens, accepted = mtp_rounds(target, start)
        assert seq.output_ids == tokens[1:]
        same_rounds(seq, accepted)
        found += seq.accepted_per_round
    assert 0.1 < sum(found) / len(found) < 0.9, "the case has to see both kinds of rounds"
    assert (sum(s.num_preemptions for s in seqs) > 0) == (case == "preemption")


@pytest.mark.parametrize("family", ["deepseek_v3", "mellum"])
def test_other_families_have_the_rounds_of_transformers(family: str, tmp_path: Path) -> None:
    target = save_mtp(tmp_path / "target", family)
    seqs = run(planned(target, run__batch_size=2), prompts_of(target))
    for seq, start in zip(seqs, STARTS, strict=True):
        tokens, accepted = mtp_rounds(target, start)
        assert seq.output_ids == tokens[1:]
        same_rounds(seq, accepted)
    assert sum(sum(s.accepted_per_round) for s in seqs) > 10


@pytest.mark.parametrize("case", SETTINGS)
def test_further_proposals_take_steps_of_the_one_module(target: Path, case: str) -> None:
    seqs = run(planned(target, 3, **SETTINGS[case]), prompts_of(target))
    oracle = reference(target)
    for seq, prompt in zip(seqs, prompts_of(target), strict=True):
        assert seq.output_ids == greedy_reference(oracle, prompt, NEW_TOKENS - 1)
        assert rounds_of(seq) == expected_rounds(target, prompt, 3)
    accepted = {a for seq in seqs for a in seq.accepted_per_round}
    assert accepted >= {0, 3}, "the case has to see rounds of all kinds"


def edited(original: Path, folder: Path, **changes: Any) -> Path:
    """A copy with other values of config keys; None removes one."""
    shutil.copytree(original, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def without(original: Path, folder: Path, dropped: str) -> Path:
    shutil.copytree(original, folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if not re.search(dropped, name)}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("value", [None, 0])
def test_a_target_that_promises_none_is_refused(target: Path, value: Any, tmp_path: Path) -> None:
    folder = edited(target, tmp_path / "none", num_nextn_predict_layers=value, num_mtp_layers=value)
    with pytest.raises(SetupError, match="promises no MTP modules: num_nextn_predict_lay") as found:
        planned(folder)
    assert found.value.code == ExitCode.ENVIRONMENT
    assert planned(folder, 0).draft is None


@pytest.mark.parametrize(
    "name",
    "eh_proj.weight enorm.weight hnorm.weight shared_head.norm.weight self_attn.q_proj.weight "
    "mlp.gate.e_score_correction_bias".split(),
)
def test_a_missing_tensor_is_named(target: Path, name: str, tmp_path: Path) -> None:
    folder = without(target, tmp_path / "lacking", rf"layers\.2\.{re.escape(name)}")
    with pytest.raises(SetupError, match=rf"first model\.layers\.2\.{re.escape(name)}"):
        planned(folder)


def test_a_projection_of_another_shape_is_refused(target: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(target, tmp_path / "narrow")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.eh_proj.weight"
    tensors[name] = tensors[name][:, :64].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SetupError, match=rf"{name} of .* has shape \[64, 64\] .* \[64, 128\]"):
        build(planned(folder), 12)


def test_several_modules_bound_k(target: Path, tmp_path: Path) -> None:
    """They are refused until a chain of them is built."""
    folder = edited(target, tmp_path / "two", num_nextn_predict_layers=2)
    with pytest.raises(SetupError, match="num_nextn_predict_layers"):
        planned(folder, 2)


def test_dummy_modules_run(target: Path) -> None:
    seqs = run(planned(target, 3, target__load_format="dummy"), STARTS)
    assert all(len(seq.output_ids) == NEW_TOKENS - 1 for seq in seqs)


def test_facts_of_a_run(target: Path) -> None:
    found = planned(target)
    assert (found.proposer, found.recipe.draft, found.k) == ("mtp", None, 1)
    assert found.execution["draft_borrows"] == "embeddings, lm_head"
    assert "fed back normed" in found.execution["draft_conventions"]
    engine = build(found, 12)
    assert isinstance(engine.proposer.head, PagedHead)  # type: ignore[union-attr]
