"""The run folder of `generate`: creating it, resuming in it, and its outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec_cli.errors import Notice
from specdec_cli.experiment.folders import settings_file
from specdec_cli.experiment.folders.record_lines import elsewhere, read_records
from specdec_cli.experiment.folders.records import Key, Sample
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.folders.samples import not_measured
from specdec_cli.experiment.folders.settings_file import RunSettings
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.preparing import common_settings
from specdec_cli.recipe import Recipe

SAMPLES = "samples.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateSettings(RunSettings):
    kind, mark = "run of generate", "batch_size"
    batch_size: int


@dataclass(slots=True)
class Kept:
    """A run's folder (on rank 0 only), its finished samples, and its warnings."""

    folder: RunFolder | None = None
    done: Mapping[int, Sample] = field(default_factory=dict)
    notices: Sequence[Notice] = ()


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

    notices: warnings to keep with a new one. own_prompts, errors: as for `settings_file.opened`.
    """
    settings = GenerateSettings(**common_settings(recipe, job), batch_size=recipe.run.batch_size)
    done: dict[int, Sample] = {}

    def load(kept: RunFolder) -> bool:
        for sample in _read(kept.path / SAMPLES, job):
            done.setdefault(sample.index, sample)
        return len(done) < len(job.prompts)

    is_old = resume and (path / settings_file.SETTINGS).exists()
    folder = settings_file.opened(
        *(path, settings, recipe, where, load),
        resume=resume,
        notices=notices,
        own_prompts=own_prompts,
    )
    return Kept(folder, done, settings_file.read_warnings(path) if is_old else ())


def _read(path: Path, job: Job) -> list[Sample]:
    """The samples of a folder. Raises `SetupError` for one that is not of this run."""
    key = key_of(job)
    known = {"draft": (key.draft,), "k": (key.k,), "batch_size": (key.batch_size,)}

    def problem(sample: Sample) -> str | None:
        return elsewhere(sample, known) or not_measured(sample, len(job.prompts), 1)

    return read_records(path, Sample, problem)
