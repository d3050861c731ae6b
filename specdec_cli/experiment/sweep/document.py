"""Builds the JSON document of a sweep.

Everything in the document is computed from the contents of the run folder, so it can be rebuilt.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from specdec_cli.core.figures import Rate
from specdec_cli.errors import ExitCode, Notice
from specdec_cli.experiment.folders.conclusions import VERSION, CheckResult, Tokens
from specdec_cli.experiment.folders.records import Key, Point, rate_name
from specdec_cli.experiment.folders.samples import Samples, could_run_no_prompt
from specdec_cli.experiment.forecasts import Forecasts, Text, expected_rounds, with_recorded
from specdec_cli.experiment.load.points import load_warnings, points_at_rate
from specdec_cli.experiment.load.recommend import best_at_rate, crossover
from specdec_cli.experiment.lossless_check import failed_check
from specdec_cli.experiment.points import Failure, arm_points, error_of
from specdec_cli.experiment.served import other_engines, remarks_of
from specdec_cli.experiment.statistics.noise import (
    disturbances,
    impossible_speeds,
    noise_in,
    predictions_off,
    proposals_of_another_k,
)
from specdec_cli.experiment.statistics.promise import compare_tokens, tokens_notice
from specdec_cli.experiment.sweep.gains import compare_arms, measured_gains, predicted_gains
from specdec_cli.experiment.sweep.recommend import recommend, recommend_by_category
from specdec_cli.experiment.sweep.sweep_records import SweepClock, SweepRecords, SweepSettings
from specdec_cli.experiment.sweep.time_curve import cost_by_part, curve_point
from specdec_cli.recipe import Recipe
from specdec_cli.text import counted


def points_at(
    settings: SweepSettings,
    records: SweepRecords,
    batch_size: int,
    failures: Mapping[Key, Failure],
    rate: Rate | None = None,
) -> list[Point]:
    """Compute the points at one batch size from the records. A point that several arms share is
    returned once, before the others.

    rate: the request rate of the points; None if all requests of a batch wait from the start.
    """
    if (offered := settings.offered) is not None:
        keys = settings.keys(batch_size, settings.ks, rate)
        return points_at_rate(offered, records.samples, records.stretches, keys, failures)
    found, seed = dict[Key, Point](), settings.seed
    for draft in settings.drafts:
        arm = [Key(draft, batch_size, k) for k in settings.ks]
        predicted = [key for key in arm if key.k not in settings.measured_ks]
        whys = dict.fromkeys(predicted, Failure("skipped", "predicted, not measured"))
        forecasts = forecasts_of(settings, records, draft, batch_size)
        for point in arm_points(records.samples, arm, whys | dict(failures), forecasts, seed):
            # A k = 0 point that several arms share belongs to no arm, so it gets no prediction.
            if point.k == 0 and settings.shares_baseline:
                point = point.model_copy(update={"prediction": None})
            # An arm that could not be forecast does not know the predicted speed of k = 0 either.
            held = found.setdefault(Key.of(point), point)
            if held.predicted_speedup is None:
                found[Key.of(point)] = point
    return list(found.values())


def forecasts_of(
    settings: SweepSettings, records: SweepRecords, draft: str | None, batch_size: int
) -> Forecasts:
    """Collect the data from which an arm's speeds at a batch size are predicted."""
    largest_k = max(settings.ks)
    largest = records.samples[Key(draft, settings.batch_sizes[0], largest_k)]
    parts = {
        k: cost_by_part(records.costs[Key(draft, batch_size, k)].values()) for k in settings.ks
    }
    texts = dict[int, Text]()
    for index, text in sorted(records.texts[draft].items()):
        sample, texts[index] = largest.get(index), text
        if settings.is_greedy and (text.accept or text.ahead) and sample is not None:
            rounds = zip(sample.proposed_per_round, sample.accepted_per_round, strict=True)
            texts[index] = with_recorded(text, rounds)[0]
    is_exact = settings.is_greedy and not any(text.is_rough for text in texts.values())
    if settings.has_given_acceptance:
        # Texts differ between values of k. A prediction is then exact only if all texts end at the
        # length limit, so that they are equally long at every k, and if all rounds propose as many
        # tokens as they may. The second condition is checked on the rounds at the largest k.
        is_exact = all(sample.finish_reason in ("length", "error") for sample in largest.values())
        for index in texts.keys() & largest.keys():
            proposed = largest[index].proposed_per_round
            all_of_them = expected_rounds([texts[index]], largest_k)
            counts = all_of_them.drafts, all_of_them.draft_tokens
            is_exact = is_exact and counts == (len(proposed), sum(proposed))
    return Forecasts(
        largest_k=largest_k,
        texts=texts,
        parts={k: found for k, found in parts.items() if found},
        is_exact=is_exact,
    )


def sweep_document(
    settings: SweepSettings,
    recipe: Recipe,
    where: dict[str, Any],
    records: SweepRecords,
    points: Sequence[Point],
    warnings: Sequence[Notice],
    *,
    clock: SweepClock | None = None,
    failures: Collection[Failure] = (),
    check: CheckResult | None = None,
) -> tuple[dict[str, Any], ExitCode]:
    """Build the JSON document for `sweep-k --json` and summary.json, and return it with the exit
    code. The document has an `error` field if no point was measured.

    failures: the failures that happened in this process.
    check: the result of the losslessness check; None without `--check-lossless`.
    """
    is_closed = settings.offered is None
    samples = {key: records.samples[key] for key in sorted(records.samples, key=order_of(settings))}
    tokens = compare_tokens(settings, samples)
    told = [
        *warnings,
        *(noise_in(samples) if is_closed else load_warnings(points)),
        *impossible_speeds(points),
        *predictions_off(points),
        *proposals_of_another_k(points),
        *tokens_notice(tokens),
        *failed_check(check),
        *remarks_of(samples.values()),
        *other_engines(samples.values()),
    ]
    concluded = (_of_batches if is_closed else _at_rates)(settings, records, points, told)
    document: dict[str, Any] = {
        "schema": "specdec.sweep-k/1",
        "version": VERSION,
        "recipe": recipe.model_dump(mode="json"),
        "environment": where,
        "sweep": settings.in_document(),
        "points": list(points),
        **concluded,
        "tokens": tokens,
        "lossless_check": check,
        "warnings": told,
        "measuring": clock.as_dict() if clock is not None else None,
    }
    code = exit_code(points, samples.values(), tokens, failures, check)
    return document | error_of(points, code), code


def _of_batches(
    settings: SweepSettings,
    records: SweepRecords,
    points: Sequence[Point],
    warnings: Sequence[Notice],
) -> dict[str, Any]:
    """Compute the conclusions of a sweep without request rates, in which all requests of a batch
    wait from the start: the best point at each batch size, comparisons of the arms, and the cost
    of a round at each k (the time curve)."""
    by_size = {b: [p for p in points if p.batch_size == b] for b in settings.batch_sizes}
    gains = {}
    for b, at in by_size.items():
        if any(point.status == "skipped" for point in at):
            of_arms = {d: forecasts_of(settings, records, d, b) for d in settings.drafts}
            gains[b] = predicted_gains(at, of_arms)
        else:
            gains[b] = measured_gains(at, records.samples)
    best = {}
    for b, at in by_size.items():
        disturbed = disturbances(warnings, b)
        parts = recommend_by_category(gains[b], records.samples, settings.seed, disturbed)
        whole = recommend(at, gains[b], settings.seed, disturbed)
        best[b] = whole.model_copy(update={"per_category": parts})
    return {
        "best": best[settings.batch_sizes[0]],
        "best_by_batch_size": {str(b): found for b, found in best.items()},
        "comparisons": [
            one
            for b in settings.batch_sizes
            for one in compare_arms(gains[b], records.samples, settings.seed)
        ],
        "time_curve": [
            curve_point(key, found)
            for key in sorted(records.costs, key=order_of(settings))
            if (found := records.costs[key])
        ],
    }


def _at_rates(
    settings: SweepSettings,
    records: SweepRecords,
    points: Sequence[Point],
    warnings: Sequence[Notice],
) -> dict[str, Any]:
    """Compute the conclusions of a sweep whose requests arrive at given rates: the best point at
    each rate, and the rates up to which speculation pays."""
    best = {
        rate: best_at_rate(
            [p for p in points if p.request_rate == rate],
            records.samples,
            disturbances(warnings, rate=rate),
        )
        for _, rate in settings.levels
        if rate is not None
    }
    return {
        "best": next(iter(best.values())),
        "best_by_batch_size": {},
        "best_by_request_rate": {rate_name(rate): found for rate, found in best.items()},
        "crossover": crossover(best),
        "comparisons": [],
        "time_curve": [],
    }


def order_of(settings: SweepSettings) -> Callable[[Key], tuple[float, ...]]:
    """Return a function that gives the sort key of a point: by rate, then batch size, then draft in
    the order of the settings, then k."""
    places = {draft: place for place, draft in enumerate(settings.drafts)}
    return lambda key: (
        float(key.request_rate or 0.0),
        key.batch_size,
        places.get(key.draft, -1),
        key.k,
    )


def prompts_that_failed(samples: Iterable[Samples]) -> list[Notice]:
    """Return a warning if some prompts could not run, otherwise an empty list. samples: the samples
    of each point, by prompt."""
    failed = {
        sample.index: sample.error or "no reason is known"
        for found in samples
        for sample in found.values()
        if not sample.could_run
    }
    if not failed:
        return []
    first = min(failed)
    which = f"prompt {first}: {failed[first]}"
    more = f" (and {counted(len(failed) - 1, 'more prompt')})" if len(failed) > 1 else ""
    told = f"not every prompt could run; these are left out: {which}{more}"
    return [Notice("prompts_failed", told, {"prompts": sorted(failed)})]


def exit_code(
    points: Iterable[Point],
    samples: Iterable[Samples],
    tokens: Tokens,
    failures: Iterable[Failure] = (),
    check: CheckResult | None = None,
    *,
    is_partial: bool = False,
) -> ExitCode:
    """Return the exit code of a sweep or a comparison.

    - LOSSLESSNESS if tokens differ although they must be identical, or if `check` did not pass.
      This takes precedence over missing results.
    - If every point failed: ENVIRONMENT if all ran out of memory, else the code that all `failures`
      have in common, else RUN_FAILED.
    - PARTIAL if some points or prompts failed, if no prompt could run, or if `is_partial` is true.

    samples: the samples of each point.
    failures: the failures that happened in this process.
    """
    points = [p for p in points if p.status != "skipped"]
    statuses = {p.status for p in points}
    if tokens.is_broken or (check is not None and not check.passed):
        return ExitCode.LOSSLESSNESS
    if "ok" not in statuses and not all(could_run_no_prompt(p.reason) for p in points):
        codes = {failure.code for failure in failures}
        if statuses == {"oom"}:
            return ExitCode.ENVIRONMENT
        return ExitCode(codes.pop()) if len(codes) == 1 else ExitCode.RUN_FAILED
    all_ran = all(s.could_run for found in samples for s in found.values())
    return ExitCode.OK if statuses == {"ok"} and all_ran and not is_partial else ExitCode.PARTIAL
