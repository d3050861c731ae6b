"""Creates, resumes and reads the run folder of a sweep. Also reads the k = 0 samples of another
run, to serve as the baseline."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_cli.errors import ExitCode, Notice, UsageError
from specdec_cli.experiment.disk import refuse_special_files
from specdec_cli.experiment.folders import settings_file
from specdec_cli.experiment.folders.conclusions import CheckResult
from specdec_cli.experiment.folders.record_lines import checked, read_records, to_json
from specdec_cli.experiment.folders.records import Key, Point, Sample
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.folders.settings_difference import first_difference
from specdec_cli.experiment.sweep.document import prompts_that_failed, sweep_document
from specdec_cli.experiment.sweep.running import Running
from specdec_cli.experiment.sweep.sweep_plan import SweepPlan, warnings_of
from specdec_cli.experiment.sweep.sweep_records import SweepClock, SweepRecords, SweepSettings
from specdec_cli.text import one_line, shown


def open_folder(path: Path, plan: SweepPlan, records: SweepRecords, *, resume: bool) -> RunFolder:
    """Open the sweep's run folder, new or resumed, and read its records into `records`.

    Raises `UsageError` if the folder holds a sweep with other settings, or no sweep at all.
    """
    where = _where(plan)

    def load(kept: RunFolder) -> bool:
        records.load(kept.path, plan.settings)
        if not plan.jobs[0].backend.is_native:  # a server may answer on the second attempt
            records.drop_failed()
        summary = settings_file.read_json(path / "summary.json")
        earlier = summary if isinstance(summary, dict) else {}
        records.earlier_clock = _clock_of(earlier.get("measuring"))
        check = checked(earlier.get("lossless_check"), CheckResult)
        records.earlier_check = None if isinstance(check, str) else check
        records.earlier_where = settings_file.earlier_environment(path, where)
        return sum(map(len, records.samples.values())) < plan.num_samples

    if resume and (path / settings_file.SETTINGS).exists():
        read_settings(path)  # only to raise an error if the settings are damaged
    records.folder = settings_file.opened(
        *(path, plan.settings, plan.recipe, where, load),
        resume=resume,
        notices=warnings_of(plan),
        own_prompts=plan.own_prompts,
    )
    return records.folder


def read_settings(path: Path) -> SweepSettings:
    """Read the settings from a sweep's folder. Raises `UsageError` if the folder has none, and
    `SetupError` if they are damaged."""
    found = settings_file.kept_settings(path, SweepSettings)
    if not found:
        raise UsageError(
            f"{path} is not a sweep's folder: its {settings_file.SETTINGS} belongs to "
            "another command",
            "name a folder that sweep-k wrote",
        )
    return SweepSettings.of_dict(found)


def finish(
    sweep: Running, points: Sequence[Point], warnings: Sequence[Notice]
) -> tuple[dict[str, Any], ExitCode]:
    """Build the sweep's document and write it as the folder's summary. Return it with the exit
    code."""
    plan, records, clock = sweep.plan, sweep.records, sweep.clock
    warnings = [*warnings, *prompts_that_failed(records.samples.values())]
    where = _where(plan)
    if records.earlier_where is not None and not clock.rounds:  # this process measured nothing
        clock, where = records.earlier_clock, records.earlier_where
    document, code = sweep_document(
        *(plan.settings, plan.recipe, where, records, points, warnings),
        clock=clock,
        failures=sweep.failures.values(),
        check=sweep.check.result if sweep.check is not None else records.earlier_check,
    )
    if plan.jobs[0].backend.is_native:
        # Imported here, because both modules import torch, which merging does not need.
        from specdec_cli.experiment.duration import own_plan
        from specdec_cli.experiment.memory import memory_cost

        document["memory"] = [
            memory_cost(own_plan(job), job.longest_prompt, where) for job in plan.jobs
        ]
    if records.folder is not None:
        records.folder.write("summary.json", to_json(document) + "\n")
    return document, code


def _clock_of(found: Any) -> SweepClock:
    """Read the clock from a value of summary.json. Returns zeros if its times are missing or not
    valid."""
    try:
        times = [float(found[name]) for name in ("rounds", "measuring", "processor")]
    except (ValueError, KeyError, TypeError):
        return SweepClock()
    return SweepClock(*times) if all(map(math.isfinite, times)) else SweepClock()


def _where(plan: SweepPlan) -> dict[str, Any]:
    job = plan.jobs[0]
    found = job.backend.environment(job.plan)
    if job.backend.is_native:
        found["cache"] = (
            "sized for the largest k and batch size, the same at every point, k = 0 included"
        )
        if len(plan.jobs) > 1:
            found["drafts"] = _by_draft(plan)
    return found


def _by_draft(plan: SweepPlan) -> dict[str, dict[str, Any]]:
    """Return each draft's environment, reduced to the values that differ between drafts, such as
    how the checkpoint is read."""
    each = {str(job.plan.proposer): job.backend.environment(job.plan) for job in plan.jobs}
    return {
        name: {
            key: value
            for key, value in own.items()
            if any(other.get(key) != value for other in each.values())
        }
        for name, own in each.items()
    }


def samples_of(folder: Path, plan: SweepPlan) -> list[Sample]:
    """Read the k = 0 samples of the plan's prompts from another run's folder. They are returned
    with the keys that the plan gives to its own k = 0 points.

    Raises `UsageError` if the folder has no such samples, or if they are for different prompts or
    settings.
    """
    name = f"--baseline: {one_line(str(folder))}"
    refuse_special_files(folder)
    theirs = settings_file.read_settings_file(folder).get("settings")
    recipe = theirs.get("recipe") if isinstance(theirs, dict) else None
    ours = plan.recipe.sampling.model_dump(mode="json")
    found = first_difference(ours, recipe.get("sampling") if isinstance(recipe, dict) else None)
    if found is not None:
        which, own, other = found
        raise UsageError(
            f"{name} has sampling.{which} {shown(other)}, but this sweep has {shown(own)}"
        )
    every = read_records(folder / "samples.jsonl", Sample)
    plain = {(s.batch_size, s.index): s for s in every if s.k == 0}
    if not plain:
        ks = ", ".join(map(str, sorted({s.k for s in every}))) or "none"
        raise UsageError(f"{name} has no samples at k = 0, only at k = {ks}")
    job, taken = plan.jobs[0], []
    for size in plan.settings.batch_sizes:
        for prompt, ids in zip(job.prompts, job.token_ids, strict=True):
            sample = plain.get((size, prompt.index))
            if sample is None or sample.prompt_token_ids != list(ids):
                sizes = {s.batch_size for s in plain.values()}
                if size not in sizes:
                    told = f"has no batch size {size}, only {', '.join(map(str, sorted(sizes)))}"
                else:
                    told = f"has other prompts: {prompt.index} differs"
                raise UsageError(f"{name} {told}")
            if len(sample.seconds) != plan.settings.repeats:
                raise UsageError(
                    f"{name} has {len(sample.seconds)} repeats, but run.repeats is "
                    f"{plan.settings.repeats}"
                )
            taken.append(sample.model_copy(update=Key(None, size, 0).as_dict()))
    return taken
