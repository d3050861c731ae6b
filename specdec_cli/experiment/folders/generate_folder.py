"""The run folder of `generate`: creating it, resuming in it, and its outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec_cli.errors import Notice, UsageError
from specdec_cli.experiment.disk import refuse_special_files
from specdec_cli.experiment.folders import settings_file
from specdec_cli.experiment.folders.records import (
    Key,
    Sample,
    elsewhere,
    not_measured,
    read_records,
)
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.folders.run_settings import RunSettings, settings_values
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.preparing import device_settings, with_weights
from specdec_cli.recipe import Recipe
from specdec_cli.text import digest

SAMPLES = "samples.jsonl"


@dataclass(frozen=True, slots=True)
class GenerateSettings(RunSettings):
    """The settings that samples depend on; a resumed run must have the same.

    prompts: how many, and digests of their tokens and categories.
    """

    batch_size: int
    prompts: dict[str, Any]
    device: str
    dtype: str


@dataclass(slots=True)
class Kept:
    """A run's folder, on rank 0 only, what is done already, and warnings that belong to it."""

    folder: RunFolder | None = None
    done: Mapping[int, Sample] = field(default_factory=dict)
    notices: Sequence[Notice] = ()

    def without_folder(self) -> "Kept":
        """The same, for a rank that writes nothing."""
        return Kept(None, self.done, self.notices)


def key_of(job: Job) -> Key:
    """The point that the run's records belong to."""
    return Key(job.plan.proposer, job.plan.recipe.run.batch_size, job.plan.k)


def open_folder(
    path: Path,
    recipe: Recipe,
    job: Job,
    where: dict[str, Any],
    notices: Sequence[Notice],
    own_prompts: str | None,
    *,
    resume: bool,
) -> Kept:
    """The run's folder, new or (resume) with the samples that it holds.

    notices: warnings to keep with a new one. own_prompts: as for `RunFolder.create`. Raises
    `UsageError` where the folder holds a run with other settings or prompts, or another command's.
    """
    settings = _settings(recipe, job)
    if not resume or not (path / settings_file.SETTINGS).exists():
        folder = RunFolder.create(path, recipe, where, own_prompts)
        settings_file.write_settings(folder, settings, notices)
        return Kept(folder)
    refuse_special_files(path)
    theirs = settings_file.read_settings_file(path).get("settings")
    if not isinstance(theirs, dict) or "batch_size" not in theirs:
        raise UsageError(f"{path} holds no run of generate", "name another with -o")
    settings_file.check_same(path, "run", theirs, settings.as_dict())
    done: dict[int, Sample] = {}

    def load(kept: RunFolder) -> None:
        for sample in _read(kept.path / SAMPLES, job):
            done.setdefault(sample.index, sample)

    folder = settings_file.reopened(path, load)
    if not (path / "recipe.yaml").exists():
        folder.write_recipe(recipe)
    if len(done) < len(job.prompts):
        settings_file.keep_environment_warning(folder, settings, where)
    return Kept(folder, done, settings_file.read_warnings(path))


def _settings(recipe: Recipe, job: Job) -> GenerateSettings:
    values = settings_values(recipe)
    for role in ("target", "draft"):
        if values[role] is not None:
            values[role] = with_weights(values[role], job.plan, role)
    return GenerateSettings(
        recipe=values,
        batch_size=recipe.run.batch_size,
        prompts={
            "count": len(job.prompts),
            "sha256": digest(job.token_ids),
            "categories": digest([prompt.category for prompt in job.prompts]),
        },
        **device_settings(job),
    )


def _read(path: Path, job: Job) -> list[Sample]:
    """The samples of a folder. Raises `SetupError` for one that is not of this run."""
    key = key_of(job)
    known = {"draft": (key.draft,), "k": (key.k,), "batch_size": (key.batch_size,)}

    def problem(sample: Sample) -> str | None:
        return elsewhere(sample, known) or not_measured(sample, len(job.prompts), 1)

    return read_records(path, Sample, problem)
