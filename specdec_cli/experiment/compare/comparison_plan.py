"""Plans a comparison: checks the recipe and finds the pairs of TP degrees to measure.

Planning loads no weights and starts no ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specdec_cli.backends import native
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.types import Permissions
from specdec_cli.engine.plan import Plan, draft_at
from specdec_cli.errors import Notice, SetupError, UsageError
from specdec_cli.experiment.compare.comparison_records import (
    ComparisonRecords,
    ComparisonSettings,
    Skip,
)
from specdec_cli.experiment.compare.worker import WARM_UP_TOKENS, with_degrees
from specdec_cli.experiment.duration import estimated, own_plan
from specdec_cli.experiment.folders.records import Pair
from specdec_cli.experiment.generation import Job, dated, draft_context_warning, tokenised
from specdec_cli.experiment.preparing import (
    common_settings,
    few_prompts,
    too_long,
    warnings_of_job,
)
from specdec_cli.models.description import describe
from specdec_cli.models.draft import Draft
from specdec_cli.prompts.types import PromptSet
from specdec_cli.recipe import Recipe
from specdec_cli.recipe.choices.registry import weights_from


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """A checked comparison.

    recipe: the resolved recipe, with the degrees of the first pair that runs and the first batch
        size filled in.
    job: the prompts, and both models planned for a single rank.
    skips: the pairs that will not run, each with the reason.
    notices, own_prompts: as in `SweepPlan`.
    """

    recipe: Recipe
    settings: ComparisonSettings
    job: Job
    skips: Mapping[Pair, Skip]
    permissions: Permissions
    notices: Sequence[Notice] = ()
    own_prompts: str | None = None

    @property
    def to_run(self) -> list[Pair]:
        return [pair for pair in self.settings.in_order if pair not in self.skips]

    @property
    def num_samples(self) -> int:
        a_pair = sum(2 * self.settings.num_prompts(b) for b in self.settings.batch_sizes)
        return a_pair * len(self.to_run)

    @property
    def where(self) -> dict[str, Any]:
        return native.environment(self.job.plan) | {
            "cache": "sized for the largest batch size, with the draft in place at k = 0 too"
        }


def plan_comparison(
    recipe: Recipe,
    prompts: PromptSet,
    degrees: tuple[Sequence[int], Sequence[int]],
    batch_sizes: Sequence[int],
    batches: int | None,
    permissions: Permissions,
) -> ComparisonPlan:
    """Plan a comparison: check the recipe, tokenise the prompts and find the pairs that can run.

    degrees: the target TPs and the draft TPs.
    batches: as in `ComparisonSettings`.

    Raises `UsageError` if no pair is legal, `SetupError` if every legal pair needs more GPUs than
    this machine has, and the errors of `generation.tokenised`.
    """
    method = recipe.speculation.method
    if weights_from(method) == "none" or (weights_from(method) == "draft" and recipe.draft is None):
        raise UsageError(
            "compare-tp needs a draft model, because it compares the draft's TP degrees",
            "pass --draft and --set speculation.method=draft_model, or set both in the recipe",
        )
    k = recipe.speculation.num_speculative_tokens
    if k == 0:
        raise UsageError("compare-tp: k = 0 does not use the draft", "pass -k 1 or more")
    if ":" in recipe.run.device:
        raise UsageError(
            f"run.device: {recipe.run.device} is a single device, but each rank needs its own",
            "use cuda, and CUDA_VISIBLE_DEVICES to choose among GPUs",
        )
    alone = with_degrees(recipe, Pair(1, 1))
    job = tokenised(
        native,
        native.prepare(alone, permissions, (k, max(batch_sizes))),
        prompts.prompts,
        skip_bad=prompts.skip_bad,
    )
    common = common_settings(recipe, job)
    for role in ("target", "draft") if recipe.draft is not None else ("target",):
        del common["recipe"][role]["tensor_parallel_size"]
    settings = ComparisonSettings(
        **common,
        draft=method if recipe.draft is None else recipe.draft.model,
        k=k,
        target_tps=tuple(degrees[0]),
        draft_tps=tuple(degrees[1]),
        batch_sizes=tuple(batch_sizes),
        batches=batches,
    )
    num_gpus = torch.cuda.device_count() if job.plan.device.type == "cuda" else None
    skips = skips_of(settings, job, num_gpus)
    # A recipe can hold only one pair of TP degrees and one batch size. Fill in the first pair
    # that runs and the first batch size, so that users can run the recipe in the run folder as it
    # is.
    first = next(pair for pair in settings.pairs if pair not in skips)
    kept = dated(with_degrees(recipe, first).changed("run", batch_size=batch_sizes[0]), job)
    notices = [*prompts.notices, *warnings_of_job(job, prompts.chat)]
    return ComparisonPlan(kept, settings, job, skips, permissions, notices, prompts.own)


def skips_of(settings: ComparisonSettings, job: Job, num_gpus: int | None) -> dict[Pair, Skip]:
    """Return the pairs that will not run, each with the reason. num_gpus: the number of this
    machine's GPUs; None for ranks on CPUs. Raises `UsageError` if no pair is legal, and
    `SetupError` if every legal pair needs more GPUs than this machine has."""
    found: dict[Pair, Skip] = {}
    lacking: list[str] = []  # reasons of pairs for which only GPUs are missing
    own = own_plan(job)
    target, device = own.target.spec, own.device
    unsplit = {
        ("target", t): _cannot_split(lambda part: describe(target, device, part), t)
        for t in settings.target_tps
    }
    unsplit |= {
        ("draft", d): _cannot_split(lambda part: _draft_at(own, part), d)
        for d in settings.draft_tps
    }
    is_inside = weights_from(own.recipe.speculation.method) == "target"
    needs_equal = own.draft is not None and own.draft.needs_equal_degrees
    for pair in settings.pairs:
        why = unsplit["target", pair.target_tp] or unsplit["draft", pair.draft_tp]
        if not pair.divides:
            reason = f"draft TP {pair.draft_tp} does not divide target TP {pair.target_tp}"
            found[pair] = Skip(reason, expected=True)
        elif is_inside and pair.draft_tp != pair.target_tp:
            reason = f"a draft in the target's checkpoint has target TP {pair.target_tp}"
            found[pair] = Skip(reason, expected=True)
        elif needs_equal and pair.draft_tp != pair.target_tp:
            reason = f"draft TP {pair.draft_tp} cannot borrow lm_head at target TP {pair.target_tp}"
            found[pair] = Skip(reason, expected=True)
        elif why is not None:
            found[pair] = Skip(why, expected=False)
        elif num_gpus is not None and pair.target_tp > num_gpus:
            reason = f"needs {pair.target_tp} GPUs, and this machine has {num_gpus}"
            found[pair] = Skip(reason, expected=False)
            lacking.append(reason)
    if len(found) == len(settings.pairs):
        if lacking:
            raise SetupError(f"no pair can run here: {lacking[0]}", "pass smaller --target-tp")
        legal = [skip.reason for skip in found.values() if not skip.expected]
        illegal = [skip.reason for skip in found.values() if skip.expected]
        hint = (
            "the draft's degree must divide the target's (--target-tp 4 --draft-tp 1,2,4), and "
            "must equal it if the draft uses the target's lm_head"
        )
        if legal:  # the degrees suit each other, but a model cannot be split so
            hint = "try another --target-tp or --draft-tp"
        raise UsageError(f"no legal pair: {(legal or illegal)[0]}", hint)
    return found


def _draft_at(own: Plan, part: TensorParallel) -> Draft:
    """Describe the draft at another tensor-parallel degree, and the target too if the draft needs
    the target's degree."""
    assert own.draft is not None
    if own.draft.needs_equal_degrees:
        own = replace(own, target=describe(own.target.spec, own.device, part))
    return draft_at(own, part)


def _cannot_split(described: Callable[[TensorParallel], object], size: int) -> str | None:
    """Return the reason why a model cannot be split over `size` ranks, or None if it can."""
    if size == 1:
        return None
    try:
        described(TensorParallel(size=size))
    except SetupError as problem:
        return problem.message
    return None


def warnings_of(plan: ComparisonPlan) -> list[Notice]:
    """Collect the warnings to show with the results."""
    found = []
    is_dummy = bool(plan.job.plan.random_roles)
    if is_dummy and not plan.settings.has_given_acceptance:
        told = (
            "the weights are random, so acceptance is too: set speculation.acceptance to "
            "synthetic, and rates"
        )
        found.append(Notice("random_weights", told))
    if (remark := plan.job.plan.remark) is not None:
        rule = plan.recipe.speculation.acceptance
        told = f"speculation.acceptance is {rule}: {remark}"
        found.append(Notice("acceptance_rule", told, {"rule": rule}))
    if len(plan.to_run) == 1:
        told = "only one pair is measured: name more degrees with --target-tp and --draft-tp"
        found.append(Notice("one_pair", told))
    counts = [plan.settings.num_prompts(b) for b in plan.settings.batch_sizes]
    job = plan.job
    if (short := draft_context_warning(job.plan, job.token_ids[: max(counts)])) is not None:
        found.append(Notice("draft_context", short, {"draft": plan.settings.draft}))
    found += too_long([job], max(counts))
    return [*found, *plan.notices, *few_prompts(min(counts))]


def describe_plan(
    plan: ComparisonPlan, records: ComparisonRecords, warnings: Sequence[Notice]
) -> dict[str, Any]:
    """Build the document that `--dry-run` prints. Its `text` field is the human-readable form.

    records: what is measured already.
    """
    s, run = plan.settings, plan.recipe.run
    prompts = ", ".join(f"{s.num_prompts(b)} at batch size {b}" for b in s.batch_sizes)
    left = {pair: sizes for pair in plan.to_run if (sizes := records.open_sizes(pair))}
    num_samples = sum(2 * s.num_prompts(b) for sizes in left.values() for b in sizes)
    pairs, listed = [], []
    for pair in s.pairs:
        skip = plan.skips.get(pair)
        fate = {"status": "ok"} if skip is None else {"status": "skipped", "reason": skip.reason}
        pairs.append({"target_tp": pair.target_tp, "draft_tp": pair.draft_tp} | fate)
        told = "to be measured" if pair in left else "measured"
        listed.append(f"{pair}: {told if skip is None else skip.reason}")
    text = [
        f"draft: {s.draft}, k = {s.k}",
        *listed,
        f"prompts: {prompts}; the longest has {plan.job.longest_prompt} tokens",
        f"samples: {num_samples}, k = 0 included, each measured {run.repeats} times",
    ]
    jobs = {
        key: plan.job.part(0, s.num_prompts(batch_size))
        for pair, sizes in left.items()
        for batch_size in sizes
        for key in s.keys(pair, batch_size)
    }
    line, seconds = estimated(jobs, most_warm_up=WARM_UP_TOKENS)
    text.append(line)
    return {
        "schema": "specdec.compare-tp.plan/1",
        "recipe": plan.recipe.model_dump(mode="json"),
        "comparison": s.in_document(),
        "pairs": pairs,
        "num_samples": num_samples,
        **seconds,
        "warnings": list(warnings),
        "text": "\n".join(text),
    }
