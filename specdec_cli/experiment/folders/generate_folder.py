"""Creates and resumes the run folder of `generate`, and computes the single point of such a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec_cli.core.figures import Metrics
from specdec_cli.errors import Notice, UsageError
from specdec_cli.experiment.folders import settings_file
from specdec_cli.experiment.folders.record_lines import elsewhere, read_records
from specdec_cli.experiment.folders.records import Key, Point, Sample, given
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.folders.samples import not_measured
from specdec_cli.experiment.folders.settings_file import RunSettings
from specdec_cli.experiment.generation import Job, Output
from specdec_cli.experiment.preparing import common_settings
from specdec_cli.recipe import Recipe

SAMPLES = "samples.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateSettings(RunSettings):
    kind, mark = "run of generate", "batch_size"
    batch_size: int


@dataclass(slots=True)
class Kept:
    """An opened run folder and its contents.

    folder, settings: on rank 0 only; None on other ranks and if the run has no folder.
    done: the finished samples by prompt index.
    notices: the folder's warnings.
    """

    folder: RunFolder | None = None
    done: Mapping[int, Sample] = field(default_factory=dict)
    notices: Sequence[Notice] = ()
    settings: GenerateSettings | None = None

    def keep(self, found: Sequence[Notice]) -> None:
        """Add warnings to the folder, so that a command that resumes the run repeats them."""
        if self.folder is not None and self.settings is not None:
            settings_file.keep_warnings(self.folder, self.settings, found)


def key_of(job: Job) -> Key:
    """Return the key of the point to which the run's records belong."""
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
    """Create the run's folder or, with `resume`, open an existing one and load its samples.

    notices: warnings to keep in a new folder.
    own_prompts: as for `RunFolder.create`.

    Raises the errors of `settings_file.opened`.
    """
    settings = GenerateSettings(**common_settings(recipe, job), batch_size=recipe.run.batch_size)
    done: dict[int, Sample] = {}
    key = key_of(job)
    known = {
        "draft": (job.plan.proposer, key.draft),
        "k": (key.k,),
        "batch_size": (key.batch_size,),
    }

    def problem(sample: Sample) -> str | None:
        # A server's k is not part of the recipe, so comparing the settings does not detect that it
        # changed.
        if sample.k != key.k and not job.backend.is_native:
            told = f"{path} contains a run with k = {sample.k}, and the server has k = {key.k}"
            raise UsageError(told, "name the same server, or another folder with -o")
        return elsewhere(sample, known) or not_measured(sample, len(job.prompts), 1)

    def load(kept: RunFolder) -> bool:
        for sample in read_records(kept.path / SAMPLES, Sample, problem):
            # Run prompts again that failed on a server, because it may answer the next time.
            if sample.error is None or job.backend.is_native:
                done[sample.index] = sample
        return len(done) < len(job.prompts)

    is_old = resume and (path / settings_file.SETTINGS).exists()
    folder = settings_file.opened(
        *(path, settings, recipe, where, load),
        resume=resume,
        notices=notices,
        own_prompts=own_prompts,
    )
    said = settings_file.read_warnings(path) if is_old else ()
    return Kept(folder, done, said, settings)


def point_of_run(
    outputs: Sequence[Output], metrics: Metrics, key: Key, of_engine: dict[str, Any]
) -> Point:
    """Compute the point of a `generate` run. There is no baseline, so its speed-ups are None.

    of_engine: fields of the point that only runs on a server have.
    """
    why = next((o.error for o in outputs if o.error is not None), None)
    could_run = any(o.error is None for o in outputs)
    return Point(
        **key.as_dict(),
        status="ok" if could_run else "failed",
        metrics=metrics if could_run else None,
        speedup=None,
        speedup_ci=None,
        predicted_speedup=None,
        mean_acceptance_length_ci=None,
        per_category={},
        **given(reason=None if could_run else f"no prompt could run: {why}"),
        **of_engine,
    )
