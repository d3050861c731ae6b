"""`profile-blocks`: measures or estimates the memory of every rank, and what fits into it.

Results are given in terms of the user's workload: tokens, sequences, the cost of the draft, and
advice for a batch that does not fit.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from specdec_cli.backends import native
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.types import Permissions
from specdec_cli.engine.build import load_models, measured, setup_errors
from specdec_cli.engine.devices import resolve_device
from specdec_cli.engine.memory.budget import CPU_SHARE, CacheNeed, RankMemory, Split
from specdec_cli.engine.memory.estimate import (
    Machine,
    draft_shares,
    empty_gpu,
    estimate_ranks,
    host_of,
    this_machine,
)
from specdec_cli.engine.pairing import Describe
from specdec_cli.engine.plan import Plan, cache_need, draft_at, plan_all_ranks
from specdec_cli.errors import LOGGED, SetupError, SpecdecError, UsageError
from specdec_cli.experiment.folders.conclusions import MemoryCost
from specdec_cli.experiment.folders.records import Pair
from specdec_cli.experiment.generation import tokenised
from specdec_cli.models.description import describe
from specdec_cli.prompts import Prompt
from specdec_cli.recipe import Recipe
from specdec_cli.recipe.choices.registry import weights_from

_MOST_UTILIZATION = 0.98  # largest utilization to recommend, since memory use fluctuates


@dataclass(frozen=True, slots=True)
class Profile:
    """The memory of every rank of one plan.

    context: the length, in tokens, of the sequences to hold.
    at_degree: estimates the memory at another tensor-parallel degree of the draft, or without the
    draft (k = 0) if the degree is 0; None for a measured profile.
    """

    plan: Plan
    split: Split
    context: int
    machine: Machine | None = None  # the machine of an estimate; None for a measurement
    at_degree: Callable[[int], Split] | None = None

    @property
    def block_size(self) -> int:
        return self.plan.recipe.cache.block_size

    @property
    def need(self) -> CacheNeed:
        """The cache that a full batch of sequences of `context` tokens needs."""
        return cache_need(self.plan, self.context)

    def capacity(self, num_blocks: int) -> dict[str, int]:
        """Return the capacity of a cache with `num_blocks` blocks. Block 0 holds no tokens."""
        usable = max(0, num_blocks - 1)
        return {
            "num_blocks": num_blocks,
            "max_tokens": usable * self.block_size,
            "max_sequences": usable // self.need.blocks_per_sequence,
        }

    def longest(self, num_blocks: int) -> int:
        """Return the maximum length, in tokens, of each sequence of a full batch if the cache has
        `num_blocks` blocks."""
        need, usable = self.need, max(0, num_blocks - 1)
        return max(0, usable // need.batch_size * self.block_size - 2 * (need.k + 1))


def measure_blocks(
    planned: Plan,
    prompts: list[Prompt],
    context: int | None,
    on_stage: Callable[[str], None],
    expect: Callable[[int], None],
) -> Profile:
    """Measure the memory of every rank: load the models and run the largest passes that the recipe
    allows. Every rank calls this.

    Raises `SetupError`, with the sizes, if even the smallest cache does not fit.
    """
    tokens = _context(planned, prompts, context)
    expect(len(planned.held) + 1)
    with setup_errors(planned):
        models = load_models(planned, on_stage)
    on_stage("running the largest passes")
    mine = measured(planned, models, cache_need(planned, planned.max_model_len))
    split = Split(tuple(planned.parallel.gather_objects(mine)))
    split.check(planned.recipe.cache.block_size)
    return Profile(planned, split, tokens)


# A size in bytes, and a flag. If the flag is set, the size is the memory of each GPU. Otherwise
# it is that of each GPU or of the host, depending on the recipe's device.
Room = tuple[int, bool]


@dataclass(slots=True)
class Estimator:
    """Estimates profiles from configs alone.

    Models are described once and reused by later estimates.
    """

    permissions: Permissions
    context: int | None
    _describe: Describe = field(default_factory=lambda: functools.cache(describe))

    def estimate(self, recipe: Recipe, prompts: list[Prompt], room: Room | None) -> Profile:
        """Estimate a profile. Raises `SetupError` or `UsageError` whenever the run itself would."""
        device, machine = _machine(recipe, room)
        plans = plan_all_ranks(recipe, self.permissions, device, self._describe)
        tokens = _context(plans[0], prompts, self.context)

        def at_degree(degree: int) -> Split:
            changed = (
                recipe.changed("draft", tensor_parallel_size=degree)
                if degree
                else recipe.changed("speculation", num_speculative_tokens=0)
            )
            return _split(
                plan_all_ranks(changed, self.permissions, device, self._describe), machine
            )

        return Profile(plans[0], _split(plans, machine), tokens, machine, at_degree)


def _machine(recipe: Recipe, room: Room | None) -> tuple[torch.device, Machine]:
    """Return the device and its memory: `room` if given, otherwise this machine's current
    free memory."""
    num_ranks = recipe.target.tensor_parallel_size
    wanted = recipe.run.device
    if room is None:
        device = resolve_device(wanted)
        return device, this_machine(device, num_ranks)
    size_bytes, is_of_gpu = room
    if is_of_gpu and wanted == "cpu":
        raise UsageError(
            "--device-memory is the memory of a GPU, but run.device is cpu",
            "--memory is that of the host",
        )
    # With `run.device: auto`, assume the kind of device that this machine has.
    has_gpu = wanted.startswith("cuda") or (wanted == "auto" and torch.cuda.is_available())
    if is_of_gpu or has_gpu:
        return torch.device("cuda"), empty_gpu(size_bytes, num_ranks)
    return torch.device("cpu"), host_of(size_bytes, num_ranks)


def _split(plans: Sequence[Plan], machine: Machine) -> Split:
    need = cache_need(plans[0], plans[0].max_model_len)
    return Split(tuple(estimate_ranks(plans, need, machine)), is_limit=machine.is_limit)


def document(recipe: Recipe, profile: Profile) -> dict[str, Any]:
    """Build the JSON document of `profile-blocks --json`. If several settings are estimated, the
    caller adds `points`."""
    planned, split, cost = profile.plan, profile.split, _draft_cost(profile)
    device = None if profile.machine is None else torch.device("cpu")
    where = native.environment(native.prepared(planned), device)
    if profile.machine is not None:
        where["device"] = f"{profile.machine.name} (estimated)"
    return {
        "schema": "specdec.profile-blocks/1",
        "recipe": recipe.model_dump(mode="json"),
        "environment": where,
        "method": "measured" if profile.machine is None else "estimated",
        "ranks": [_rank(rank, split) for rank in split.ranks],
        **profile.capacity(split.num_blocks),
        "block_size": profile.block_size,
        "limiting_rank": split.limiting.rank,
        "context": profile.context,
        "fit": _fit(profile, cost),
        "draft_cost": cost,
        "warnings": list(LOGGED),
    }


def point(recipe: Recipe, profile: Profile) -> dict[str, Any]:
    """Make one point of an estimate over several settings."""
    split, fate = profile.split, {"status": "ok"}
    try:
        split.check(profile.block_size)
    except SetupError as error:
        fate = {"status": "oom", "reason": error.message}
    return {
        **settings(recipe),
        **fate,
        **profile.capacity(split.num_blocks),
        "limiting_rank": split.limiting.rank,
        "ranks": [_rank(rank, split) for rank in split.ranks],
    }


def settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that distinguish the points of an estimate."""
    return {
        "draft_tp": recipe.draft.tensor_parallel_size if recipe.draft is not None else None,
        "block_size": recipe.cache.block_size,
        "gpu_memory_utilization": recipe.cache.gpu_memory_utilization,
        "k": recipe.speculation.num_speculative_tokens,
    }


def _rank(rank: RankMemory, split: Split) -> dict[str, Any]:
    more = {"stranded_bytes": split.stranded_bytes(rank), "free_bytes": rank.free_bytes}
    return asdict(rank) | {"num_blocks": rank.fits} | more


def _context(planned: Plan, prompts: list[Prompt], wanted: int | None) -> int:
    """Return the sequence length, in tokens, to compute the memory for. This is `wanted` if given.
    Otherwise it is the length of the longest prompt with its output, or the model's limit if there
    are no prompts."""
    recipe, most = planned.recipe, planned.max_model_len
    if wanted is not None:
        if wanted > most:
            raise UsageError(
                f"--context: {wanted} tokens exceed the context length of {most} tokens",
                "the limit is cache.max_model_len, or the model's own",
            )
        return wanted
    if not prompts:
        return most
    job = tokenised(native, native.prepared(planned), prompts)
    return min(job.longest_prompt + recipe.sampling.max_new_tokens, most)


def _fit(profile: Profile, cost: dict[str, Any] | None) -> dict[str, Any]:
    """Build the `fit` section of the JSON document: whether the recipe's batch fits with sequences
    of the profile's context, and advice if it does not."""
    need, split = profile.need, profile.split
    asked = profile.plan.recipe.cache.num_blocks
    held = split.num_blocks if asked is None else min(asked, split.num_blocks)
    fits = need.num_blocks <= held and (asked is None or asked <= split.num_blocks)
    return {
        "batch_size": need.batch_size,
        "recipe_blocks": asked,
        "needed_blocks": need.num_blocks,
        "fits": fits,
        "longest_context": min(profile.longest(held), profile.plan.max_model_len),
        "advice": [] if fits else _advice(profile, cost),
    }


def _advice(profile: Profile, cost: dict[str, Any] | None) -> list[str]:
    """List changes to the recipe, each of which would make the batch fit."""
    need, split = profile.need, profile.split
    asked = profile.plan.recipe.cache.num_blocks
    if need.num_blocks <= split.num_blocks:
        return [f"--num-blocks {need.num_blocks}: that many fit, and so does the batch"]
    found = _more_room(profile, cost)
    if asked is None:
        return found
    lifted = " --set cache.num_blocks=null"
    return [
        re.sub(r"^(-\S+ [^\s:,]+)", rf"\1{lifted}", line) + "; leave out --num-blocks"
        for line in found
    ]


def _more_room(profile: Profile, cost: dict[str, Any] | None) -> list[str]:
    """List changes to the recipe for a batch that needs more blocks than the memory holds. Each
    change alone would make the batch fit."""
    need, split, planned = profile.need, profile.split, profile.plan
    found = []
    if batch := profile.capacity(split.num_blocks)["max_sequences"]:
        found.append(f"--batch-size {batch}: that many sequences of {need.longest} tokens fit")
    if (longest := profile.longest(split.num_blocks)) > 0:
        found.append(f"--set cache.max_model_len={longest}: the batch fits at that length")
    wanted = [rank.held_bytes + need.num_blocks * rank.block_bytes for rank in split.ranks]
    if planned.device.type == "cpu":
        # If weights and activations must fit into the memory too, a larger cache.cpu_bytes helps
        # only if they all fit.
        can_grow = not split.is_limit or all(
            w <= rank.total_bytes for w, rank in zip(wanted, split.ranks, strict=True)
        )
        total = need.num_blocks * max(rank.block_bytes for rank in split.ranks) * len(split.ranks)
        if can_grow:
            found.append(f"--set cache.cpu_bytes={total}, if the host has them")
    else:
        shares = [w / rank.total_bytes for w, rank in zip(wanted, split.ranks, strict=True)]
        if (share := math.ceil(max(shares) * 1000) / 1000) <= _MOST_UTILIZATION:
            found.append(f"--set cache.gpu_memory_utilization={share:g}")
    if cost is None:
        return found
    for row in cost["by_draft_tp"]:
        if row["status"] == "ok" and row["num_blocks"] >= need.num_blocks:
            found.append(f"--draft-tp {row['draft_tp']}: {row['num_blocks']} blocks fit")
    if cost["target_alone"]["num_blocks"] >= need.num_blocks:
        found.append("-k 0: it fits without the draft")
    return found


def _draft_cost(profile: Profile) -> dict[str, Any] | None:
    """Compute how much cache capacity the draft costs, compared with the target alone, at each of
    its possible tensor-parallel degrees. Return None without a draft.

    An estimated profile is estimated again for each degree, and without the draft. In a measured
    profile, only the bytes of the draft's weights and blocks are replaced, because they can be
    computed from its config.
    """
    planned = profile.plan
    if planned.draft is None:
        return None

    def split_at(degree: int) -> Split:
        if profile.at_degree is not None:
            return profile.at_degree(degree)
        return _with_draft(profile, draft_shares(planned, degree))

    alone, rows = split_at(0), []
    size, method = planned.parallel.size, planned.recipe.speculation.method
    # A draft whose weights are in the target's checkpoint always has the target's degree.
    least = size if weights_from(method) == "target" else 1
    for degree in (d for d in range(least, size + 1) if size % d == 0):
        is_own = degree == planned.draft.parallel.size
        try:
            found = profile.split if is_own else split_at(degree)
        except SpecdecError as problem:
            rows.append({"draft_tp": degree, "status": "skipped", "reason": problem.message})
            continue
        # The share of the capacity without a draft that is lost to the draft.
        lost = 1.0 - found.num_blocks / alone.num_blocks if alone.num_blocks else 0.0
        rows.append(
            {
                "draft_tp": degree,
                "status": "ok",
                **profile.capacity(found.num_blocks),
                "limiting_rank": found.limiting.rank,
                "lost_share": lost,
                "stranded_bytes": sum(found.stranded_bytes(r) for r in found.ranks),
            }
        )
    return {"target_alone": profile.capacity(alone.num_blocks), "by_draft_tp": rows}


def _with_draft(profile: Profile, shares: Sequence[tuple[int, int]]) -> Split:
    """Return the measured memory of each rank with the sizes of its draft replaced by `shares`.
    Ranks on a CPU are assumed to share one host.

    shares: for each rank, the bytes of the draft's weights and those of one of its cache blocks.
    """
    on_gpu, measured_ranks = profile.plan.device.type == "cuda", profile.split.ranks
    # On a CPU the caches get a share of the memory that the weights of all ranks leave free.
    freed = sum(r.draft_weight_bytes for r in measured_ranks) - sum(w for w, _ in shares)
    is_share = profile.plan.recipe.cache.cpu_bytes is None
    of_host = int(CPU_SHARE * freed) // len(measured_ranks) if is_share else 0
    ranks = []
    for rank, (weights, block) in zip(measured_ranks, shares, strict=True):
        more = rank.draft_weight_bytes - weights if on_gpu else of_host
        ranks.append(
            replace(
                rank,
                draft_weight_bytes=weights,
                draft_block_bytes=block,
                kv_budget_bytes=max(0, rank.kv_budget_bytes + more),
            )
        )
    return replace(profile.split, ranks=tuple(ranks))


def memory_cost(
    plan: Plan, longest_prompt: int, where: Mapping[str, Any], pair: Pair | None = None
) -> MemoryCost:
    """Compute the memory that a plan's draft adds to its target, on a rank that holds shards of
    both.

    where: the record of the run's environment, which includes the GPU's memory.
    pair: the tensor-parallel degrees in a comparison; None to use the plan's own degrees.
    """
    target, draft = plan.target, plan.draft
    if pair is not None:
        target = describe(target.spec, plan.device, TensorParallel(size=pair.target_tp))
        part = TensorParallel(size=pair.draft_tp)
        draft = draft_at(replace(plan, target=target), part)
    cache, whole = plan.recipe.cache, where.get("gpu_memory_bytes")
    size = cache.block_size
    return MemoryCost(
        draft=plan.recipe.proposer if pair is None else None,
        target_weight_bytes=target.weight_bytes,
        draft_weight_bytes=draft.weight_bytes if draft is not None else 0,
        target_token_bytes=target.block_bytes(size) / size,
        draft_token_bytes=draft.block_bytes(size) / size if draft is not None else 0.0,
        longest_tokens=longest_prompt + plan.recipe.sampling.max_new_tokens,
        device_bytes=None if whole is None else int(whole * cache.gpu_memory_utilization),
        target_tp=pair.target_tp if pair is not None else None,
        draft_tp=pair.draft_tp if pair is not None else None,
    )
