"""Runs with drafts of every kind: plans over tiny pairs, the ways to schedule them, and rounds."""

from pathlib import Path
from typing import Any

import pytest

from specdec_cli.core.types import Permissions, Request
from specdec_cli.engine.build import build, load_models, measured
from specdec_cli.engine.memory.budget import CacheNeed
from specdec_cli.engine.memory.estimate import estimate_ranks, this_machine
from specdec_cli.engine.plan import Plan, plan, plan_all_ranks
from specdec_cli.recipe import load_recipe

NEW_TOKENS = 24


def schedules(num_blocks: int) -> dict[str, dict[str, Any]]:
    """Keys of a recipe by a name. num_blocks: too few for four sequences at their end."""
    return {
        "one by one": {"run.batch_size": 1},
        "refills": {"run.batch_size": 2},
        "chunks": {"run.batch_size": 3, "run.prefill_chunk": 3},
        "preemption": {"run.batch_size": 4, "cache.num_blocks": num_blocks},
    }


def planned(target: Path, draft: Path | str, k: int, **more: Any) -> Plan:
    """more: further keys, with __ for a dot."""
    sets = {
        "target.model": str(target),
        "draft.model": str(draft),
        "speculation.num_speculative_tokens": k,
        "sampling.max_new_tokens": NEW_TOKENS,
        "sampling.ignore_eos": True,
        "cache.block_size": 4,
        "run.batch_size": 4,
        "run.device": "cpu",
    }
    return plan(load_recipe(None, sets | {n.replace("__", "."): v for n, v in more.items()}))


def run(found: Plan, prompts: list[list[int]], k: int | None = None) -> list[Any]:
    """The finished sequences; every block is freed."""
    engine = build(found, 12)
    requests = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    seqs = engine.run(requests, found.k if k is None else k, found.params).seqs
    assert engine.allocator.num_used == 0
    return seqs


def rounds_of(seq: Any) -> list[tuple[int, int]]:
    """Proposed and accepted tokens of each round."""
    return list(zip(seq.proposed_per_round, seq.accepted_per_round, strict=True))


def estimates(found: Plan, need: CacheNeed) -> list[Any]:
    plans = plan_all_ranks(found.recipe, Permissions(), found.device)
    return estimate_ranks(plans, need, this_machine(found.device, 1))


def check_estimates(found: Plan, off: int = 0) -> None:
    """An estimate is near what is measured. off: bytes by which the draft's weights may differ."""
    need = CacheNeed(4, 300, found.k, 4)
    (guess,) = estimates(found, need)
    mine = measured(found, load_models(found), need)
    assert mine.fits == pytest.approx(guess.fits, rel=0.05)
    assert abs(mine.draft_weight_bytes - guess.draft_weight_bytes) <= off
    assert mine.activation_bytes < 4 * guess.activation_bytes
    assert guess.activation_bytes < 4 * mine.activation_bytes
