"""Chooses how many prompts, tokens and repeats of a sweep fit into a given time. Does not load
weights."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from specdec_cli.errors import UsageError
from specdec_cli.experiment.duration import in_words, own_plan, total_seconds
from specdec_cli.experiment.sweep.sweep_plan import SweepPlan
from specdec_cli.recipe import Recipe
from specdec_cli.text import counted

_AIM = 0.7  # plan for only this share of the given time, because estimates are often too low
_FEWEST_PROMPTS, _FEWEST_TOKENS, _USUAL_TOKENS = 8, 16, 64


@dataclass(frozen=True, slots=True)
class Fit:
    """The size of a sweep, and how many seconds a sweep of this size is estimated to take."""

    prompts: int
    max_new_tokens: int
    repeats: int
    seconds: float = 0.0

    @property
    def text(self) -> str:
        return (
            f"{self.prompts} prompts, at most {self.max_new_tokens} tokens each, "
            f"{counted(self.repeats, 'repeat')}: about "
            f"{in_words(self.seconds)}"
        )


def fitting(plan: SweepPlan, seconds: float) -> Fit:
    """Find the largest size of a sweep that should take at most `seconds`, with a margin for wrong
    estimates.

    The size is reduced in this order: repeats to 1, tokens per prompt to 64, prompts to 8 or to the
    largest batch size, and tokens per prompt to 16. Repeats come first, since the width of
    confidence intervals depends on the number of prompts, not on the number of repeats.

    Raises `UsageError` if even the smallest size should take longer.
    """
    found = None
    for size in _sizes(plan):
        found = replace(size, seconds=_seconds(plan, size))
        if found.seconds <= _AIM * seconds:
            return found
    assert found is not None
    needed = math.ceil(found.seconds / _AIM / 6) / 10
    raise UsageError(
        f"--minutes {seconds / 60:g}: the smallest sweep of these points is {found.text}, which "
        f"needs --minutes {needed:g}, since estimates are often too low",
        "give more minutes, fewer k, drafts or batch sizes, or --predict-only",
    )


def _sizes(plan: SweepPlan) -> Iterator[Fit]:
    recipe = plan.recipe
    prompts, repeats = plan.num_prompts, recipe.run.repeats
    tokens, least = recipe.sampling.max_new_tokens, recipe.sampling.min_new_tokens
    few_tokens, usual_tokens = max(_FEWEST_TOKENS, least), max(_USUAL_TOKENS, least)
    fewest = max(_FEWEST_PROMPTS, *plan.settings.batch_sizes)  # fewer cannot fill the largest batch
    while repeats > 1:
        yield Fit(prompts, tokens, repeats)
        repeats -= 1
    while tokens > usual_tokens:
        yield Fit(prompts, tokens, 1)
        tokens = max(usual_tokens, tokens // 2)
    while prompts > fewest:
        yield Fit(prompts, tokens, 1)
        prompts = max(fewest, prompts * 9 // 10)
    while tokens > few_tokens:
        yield Fit(prompts, tokens, 1)
        tokens = max(few_tokens, tokens // 2)
    yield Fit(prompts, tokens, 1)


def sweep_seconds(plan: SweepPlan) -> float:
    """Estimate how many seconds a planned sweep takes."""
    return total_seconds(**plan.cost)


def _seconds(plan: SweepPlan, size: Fit) -> float:
    """Estimate how many seconds the planned sweep would take with this size."""
    jobs = []
    for job in plan.jobs:
        recipe = of_size(job.plan.recipe, size)
        own = replace(job.plan, recipe=recipe, own=replace(own_plan(job), recipe=recipe))
        jobs.append(replace(job.part(0, size.prompts), plan=own))
    return sweep_seconds(replace(plan, jobs=jobs))


def of_size(recipe: Recipe, size: Fit) -> Recipe:
    """Return the recipe with the tokens and repeats of `size`."""
    fewer = recipe.changed("sampling", max_new_tokens=size.max_new_tokens)
    return fewer.changed("run", repeats=size.repeats)
