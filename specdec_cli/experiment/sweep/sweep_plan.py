"""Plans a sweep: its settings, a job for each draft, and the document of `--dry-run`. Does not load
weights."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec_cli.backends.base import Backend
from specdec_cli.core.types import Permissions
from specdec_cli.errors import Notice, UsageError
from specdec_cli.experiment.folders.records import rate_in_words, rate_name
from specdec_cli.experiment.generation import Job, dated, draft_context_warning, tokenised
from specdec_cli.experiment.load.arrivals import process_of
from specdec_cli.experiment.lossless_check import refuse_unfit
from specdec_cli.experiment.preparing import (
    common_settings,
    too_long,
    warnings_of_job,
    with_weights,
)
from specdec_cli.experiment.sweep.sweep_records import SweepSettings
from specdec_cli.prompts.types import PromptSet
from specdec_cli.recipe import Recipe
from specdec_cli.recipe.choices.registry import METHODS, NONE, weights_from
from specdec_cli.recipe.watched import WatchedOptions

_OFF = 0.1  # a larger relative difference between two rates causes a warning

_LONG_S = 3600.0  # the plan of a longer sweep suggests --minutes


@dataclass(slots=True)
class SweepPlan:
    """A sweep whose settings were checked, but whose weights are not loaded yet.

    recipe: the command line's resolved recipe.
    jobs: one for each draft, with this shard's prompts.
    notices: warnings that are the same for all shards.
    own_prompts: the text of the prompts if the run folder must store them, because they are in no
        other file; otherwise None.
    check_lossless: whether to compare texts with those of the target alone.
    """

    recipe: Recipe
    settings: SweepSettings
    jobs: list[Job]
    notices: Sequence[Notice] = ()
    own_prompts: str | None = None
    check_lossless: bool = False

    @property
    def num_prompts(self) -> int:
        return len(self.jobs[0].prompts)

    @property
    def cost(self) -> dict[str, Any]:
        """The arguments of `duration.total_seconds`: all points, each with its job, and those that
        are measured, not predicted."""
        s, jobs = self.settings, dict(zip(self.settings.drafts, self.jobs, strict=True))
        keys = [key for b, rate in s.levels for key in s.keys(b, s.ks, rate)]
        return {
            "jobs": {key: jobs.get(key.draft, self.jobs[0]) for key in keys},
            "measured": s.measured_keys,
            "has_curve": max(s.ks) > 0,
        }

    @property
    def num_samples(self) -> int:
        keys, settings = self.settings.measured_keys, self.settings
        return sum(settings.num_samples(key.request_rate, self.num_prompts) for key in keys)


def plan_sweep(
    backend: Backend,
    recipes: Sequence[Recipe],
    prompts: PromptSet,
    ks: Sequence[int],
    batch_sizes: Sequence[int],
    permissions: Permissions,
    *,
    predict_only: bool = False,
    shard: tuple[int, int] | None = None,
    check_lossless: bool = False,
) -> SweepPlan:
    """Check the settings of a sweep, tokenise its prompts, and return its plan.

    recipes: a recipe for each draft. They may differ only in the draft and its method.
    shard: the index of this shard and the number of shards; None for a whole sweep.

    Raises `UsageError` if the sweep has a k > 0 but no proposer, and the errors of
    `generation.tokenised`.
    """
    largest = max(ks)
    for recipe in recipes:
        method = recipe.speculation.method
        if largest and method == NONE and backend.is_native:
            if recipe.draft is not None:
                told = "no proposals: speculation.method is none"
                raise UsageError(told, "leave speculation.method out, or pass --k 0")
            raise UsageError("no proposals: the recipe has no draft", "pass --draft, or --k 0")
        if len(recipes) > 1 and recipe.draft is not None and weights_from(method) != "draft":
            raise UsageError(
                f"--draft: speculation.method is {method}, which takes no draft",
                "leave --draft or speculation.method out",
            )
    options = WatchedOptions(recipes[0].speculation.options)  # records the keys that any arm reads
    jobs = [
        tokenised(
            backend,
            backend.prepare(r, permissions, (largest, max(batch_sizes))),
            prompts.prompts,
            skip_bad=prompts.skip_bad,
        )
        for r in (recipe.changed("speculation", options=options) for recipe in recipes)
    ]
    if check_lossless:
        refuse_unfit(jobs[0].plan, ks)
    recipe = _with_load(recipes[0])
    names = _different(jobs)
    options.unmade.update(names)
    if batch_sizes[0]:  # 0 means unlimited concurrency
        recipe = recipe.changed("run", batch_size=batch_sizes[0])
    recipe = dated(recipe, jobs[0])
    common = common_settings(recipe, jobs[0], ["target"])
    del common["recipe"]["draft"]
    common["recipe"]["drafts"] = [_draft_values(job, recipe.speculation.method) for job in jobs]
    settings = SweepSettings(
        **common,
        drafts=tuple(names),
        ks=tuple(ks),
        batch_sizes=tuple(batch_sizes),
        predict_only=predict_only,
        shard=shard,
    )
    # Warnings are about the prompts of all shards, so that each shard has the same warnings.
    found = [*prompts.notices, *warnings_of_job(jobs[0], prompts.chat), *too_long(jobs)]
    for job in jobs:
        if (short := draft_context_warning(job.plan, job.token_ids)) is not None:
            name = job.plan.proposer
            short = f"{name}: {short}" if len(jobs) > 1 else short
            found.append(Notice("draft_context", short, {"draft": name}))
        if METHODS[method := job.plan.recipe.speculation.method].may_remember:
            told = (
                f"method {method}: what its prefill or commit keeps of a text helps it in the next "
                "repeat of the text and at the next k, so its acceptance may be too high: forget "
                "it in begin(self), which is called before each run (docs/methods.md)"
            )
            found.append(Notice("method_remembers", told, {"method": method}))
    found += [*_other_rate(recipe), *_without_rate(recipe)]
    if shard is not None:
        place, count = shard
        jobs = [job.only(lambda index: index % count == place) for job in jobs]
        if not jobs[0].prompts:
            raise UsageError(
                f"shard {place}/{count} has no prompts: the sweep has only "
                f"{settings.prompts['count']}"
            )
    return SweepPlan(recipe, settings, jobs, found, prompts.own, check_lossless)


def _different(jobs: Sequence[Job]) -> list[str | None]:
    """Return the names of the jobs' drafts and methods. Raises `UsageError` if two of them are the
    same draft, under one name or two."""
    found = dict[tuple[str, str | None], str | None]()
    for job in jobs:
        name = job.plan.proposer
        arm = job.plan.recipe.speculation.method, job.plan.fingerprint("draft") or name
        if arm in found:
            told = f"{name} is given twice"
            if found[arm] != name:
                told = f"{found[arm]} and {name} are one draft: their configs and weights are equal"
            raise UsageError(f"--draft: {told}", "leave one of them out")
        found[arm] = name
    return list(found.values())


def _with_load(recipe: Recipe) -> Recipe:
    """Check the recipe's settings for the arrival of requests, and return the recipe. If arrival
    times are read from a file, the returned recipe has the file's absolute path.

    Raises `UsageError` if `load.arrivals` is not a known arrival process, or if a file of arrival
    times is given together with several rates or with the rate inf.
    """
    load = recipe.load
    if load.request_rate is None:
        return recipe
    try:
        process = process_of(load.arrivals)
    except ValueError as problem:
        raise UsageError(f"--arrivals: {problem}") from None
    if process.kind != "file":
        return recipe
    if len(load.request_rate) > 1 or load.request_rate == ("inf",):
        given = ",".join(map(rate_name, load.request_rate))
        told = f"--request-rate {given}: the file of --arrivals has one rate, {process.own_rate:g}"
        raise UsageError(told, f"pass --request-rate {process.own_rate:g}")
    return recipe.changed("load", arrivals=os.path.abspath(load.arrivals))


def _other_rate(recipe: Recipe) -> list[Notice]:
    """Return a warning if the arrival times in a file have a different rate than the requested one,
    otherwise an empty list."""
    rates = recipe.load.request_rate
    own = process_of(recipe.load.arrivals).own_rate if rates else None
    if own is None or rates is None or abs(own / float(rates[0]) - 1) <= _OFF:
        return []
    told = (
        f"the due times of {recipe.load.arrivals} come at {own:.3g} a second, not {rates[0]:g}. "
        "They are used unchanged, so the rate in the tables is wrong: pass --request-rate "
        f"{own:.3g}, or another file"
    )
    return [Notice("other_rate", told, {"request_rate": rates[0], "file": own})]


def _without_rate(recipe: Recipe) -> list[Notice]:
    """Return a warning if all requests come at once and keys that need a rate are set, otherwise
    an empty list."""
    load, fields = recipe.load, type(recipe.load).model_fields
    keys = [key for key in ("arrivals", "duration_s") if getattr(load, key) != fields[key].default]
    if load.request_rate != ("inf",) or not keys:
        return []
    names = ", ".join(f"load.{key}" for key in keys)
    told = f"at request rate inf all requests come at once, and {names} has no effect"
    return [Notice("without_rate", told, {"keys": keys})]


def _draft_values(job: Job, usual: str) -> dict[str, Any] | None:
    """Return the section of the settings that describes a draft; None without a draft.

    usual: the method in the sweep's recipe. The section names the draft's method only if it is a
        different one.
    """
    recipe = job.plan.recipe
    if recipe.draft is None:
        return None
    values = with_weights(recipe.draft.model_dump(mode="json"), job.plan, "draft")
    method = recipe.speculation.method
    return values if method == usual else values | {"method": method}


def warnings_of(plan: SweepPlan) -> list[Notice]:
    """Return the warnings that the plan and the results show to the user, except for the warning
    about few prompts."""
    found = []
    if 0 not in plan.settings.ks:
        told = (
            "there is no k = 0 to compare with, so speed-ups are unknown: name a server without "
            "speculation with --baseline-server, or a run folder with --baseline"
        )
        found.append(Notice("no_baseline", told))
    is_dummy = any(job.plan.random_roles for job in plan.jobs)
    if is_dummy and max(plan.settings.ks) > 0 and not plan.settings.has_given_acceptance:
        told = (
            "the weights are random, so acceptance is too: set acceptance with "
            "--synthetic-acceptance-length or -rates"
        )
        found.append(Notice("random_weights", told))
    first = plan.jobs[0].plan
    if "target" in first.random_roles and first.has_experts:
        told = (
            "the weights are random, so routers are too: tokens choose experts about evenly. "
            "Tokens of a trained model share more experts, so its rounds read fewer. Take these "
            "times as an upper limit, or measure trained weights (target.load_format: auto)"
        )
        found.append(Notice("random_routers", told))
    if (remark := first.remark) is not None:
        rule = plan.recipe.speculation.acceptance
        told = f"speculation.acceptance is {rule}: {remark}"
        found.append(Notice("acceptance_rule", told, {"rule": rule}))
    for job in plan.jobs:
        name = job.plan.proposer
        found += [
            Notice("draft_checkpoint", f"{name}: {reading.told}", {"draft": name})
            for reading in job.plan.readings
        ]
    return [*found, *plan.notices]


def describe_plan(plan: SweepPlan, warnings: Sequence[Notice]) -> dict[str, Any]:
    """Build the JSON document of `--dry-run`. Its `text` is the human-readable form."""
    s, run = plan.settings, plan.recipe.run
    longest = max(job.longest_prompt for job in plan.jobs)
    repeats = run.repeats if s.offered is None else 1
    most = plan.num_prompts * plan.recipe.sampling.max_new_tokens
    written = plan.num_samples * plan.recipe.sampling.max_new_tokens
    points = [
        {**key.as_dict(), "batch_size": b or None, "measured": key.k in s.measured_ks}
        for b, rate in s.levels
        for key in s.keys(b, s.ks, rate)
    ]
    times = "once" if repeats == 1 else f"{repeats} times"
    size = f"batch sizes: {', '.join(map(str, s.batch_sizes))}"
    if s.offered is not None:
        rates = ", ".join(map(rate_in_words, s.offered.rates))
        most_at_once = s.batch_sizes[0] or "any number"
        size = f"arrivals: {s.offered.arrivals}, {rates}; at most under way: {most_at_once}"
    text = [
        f"drafts: {', '.join(str(d) for d in s.drafts)}"
        + (", in turn on the same prompts, with one k = 0 for all" if s.shares_baseline else ""),
        f"k: {', '.join(map(str, s.ks))}"
        + (f" (measured: {', '.join(map(str, s.measured_ks))})" if s.predict_only else ""),
        size,
        f"prompts: {plan.num_prompts}"
        + (f" (shard {s.shard[0]}/{s.shard[1]} of {s.prompts['count']})" if s.shard else "")
        + f", the longest of {longest} tokens",
        f"points: {len(points)}, samples: {plan.num_samples}, each measured {times}",
        f"tokens to write: at most {written * repeats:,}",
    ]
    seconds: dict[str, Any] = {}
    if plan.jobs[0].backend.is_native and s.offered is None:
        from specdec_cli.experiment.duration import estimated

        line, seconds = estimated(**plan.cost)
        text.append(line)
        if seconds["seconds"] > _LONG_S:
            text.append("--minutes 30 would take as many prompts, tokens and repeats as fit")
    return {
        "schema": "specdec.sweep-k.plan/1",
        "recipe": plan.recipe.model_dump(mode="json"),
        "sweep": s.in_document(),
        "points": points,
        "num_prompts": plan.num_prompts,
        "num_samples": plan.num_samples,
        "longest_prompt": longest,
        "repeats": run.repeats,
        "most_output_tokens_per_point": most,
        **seconds,
        "warnings": list(warnings),
        "text": "\n".join(text),
    }
