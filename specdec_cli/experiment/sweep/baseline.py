"""k = 0 from an earlier run's folder, in place of a server without speculation."""

from pathlib import Path

from specdec_cli.errors import UsageError
from specdec_cli.experiment.disk import refuse_special_files
from specdec_cli.experiment.folders import settings_file
from specdec_cli.experiment.folders.record_lines import read_records
from specdec_cli.experiment.folders.records import Sample
from specdec_cli.experiment.sweep.sweep_plan import SweepPlan
from specdec_cli.text import one_line, shown


def samples_of(folder: Path, plan: SweepPlan) -> list[Sample]:
    """The samples at k = 0 of the plan's prompts, as samples of its own arm.

    Raises `UsageError` where the folder has none, or they are of other prompts or settings.
    """
    name = f"--baseline: {one_line(str(folder))}"
    refuse_special_files(folder)
    theirs = settings_file.read_settings_file(folder).get("settings")
    recipe = theirs.get("recipe") if isinstance(theirs, dict) else None
    ours = plan.recipe.sampling.model_dump(mode="json")
    found = settings_file.first_difference(
        ours, recipe.get("sampling") if isinstance(recipe, dict) else None
    )
    if found is not None:
        which, own, other = found
        raise UsageError(f"{name} has sampling.{which} {shown(other)}, and here it is {shown(own)}")
    every = read_records(folder / "samples.jsonl", Sample)
    plain = {(s.batch_size, s.index): s for s in every if s.k == 0}
    if not plain:
        ks = ", ".join(map(str, sorted({s.k for s in every}))) or "none"
        raise UsageError(f"{name} speculates: it has no k = 0, but k = {ks}")
    job, taken = plan.jobs[0], []
    for size in plan.settings.batch_sizes:
        for prompt, ids in zip(job.prompts, job.token_ids, strict=True):
            sample = plain.get((size, prompt.index))
            if sample is None or sample.prompt_token_ids != list(ids):
                sizes = {s.batch_size for s in plain.values()}
                if size not in sizes:
                    told = f"has no batch size {size}, but {', '.join(map(str, sorted(sizes)))}"
                else:
                    told = f"has other prompts: {prompt.index} differs"
                raise UsageError(f"{name} {told}")
            if len(sample.seconds) != plan.settings.repeats:
                raise UsageError(
                    f"{name} has {len(sample.seconds)} repeats, and run.repeats is "
                    f"{plan.settings.repeats}"
                )
            key = plan.settings.key(job.plan.proposer, size, 0)
            taken.append(sample.model_copy(update=key.as_dict()))
    return taken
