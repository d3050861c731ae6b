"""The run of `specdec generate` and its results. Imports torch: only functions import it."""

import os
import sys
from pathlib import Path
from typing import Any

import typer

from specdec_cli.commands.options import Asked
from specdec_cli.commands.status import Stages, warn
from specdec_cli.core.figures import Metrics
from specdec_cli.engine.build import build
from specdec_cli.engine.run import Emission
from specdec_cli.errors import ExitCode, Notice, UsageError
from specdec_cli.experiment.generation import Job, Ready, baseline, prepare, requests
from specdec_cli.experiment.lossless_check import (
    PROMPTS,
    LosslessCheck,
    failed_check,
    greedy_texts,
    refuse_unfit,
    texts_of,
)
from specdec_cli.experiment.machine import MachineWatch
from specdec_cli.experiment.promise import check_line
from specdec_cli.experiment.records import Key
from specdec_cli.experiment.results import (
    Output,
    environment,
    generate_document,
    point_record,
    to_json,
)
from specdec_cli.experiment.run_folder import RunFolder
from specdec_cli.launch.world import World
from specdec_cli.prompts import Prompt, jsonl_of
from specdec_cli.recipe import DataSection, Recipe
from specdec_cli.terminal.render import has_colour, print_failures, print_summary
from specdec_cli.terminal.sinks import collector, shows_live_text, sinks_for

_PROMPTS = "prompts.jsonl"  # in a run folder: prompts that no file of the user holds


def get_ready(
    world: World,
    resolved: Recipe,
    prompts: list[Prompt],
    asked: Asked,
    stages: Stages,
    *,
    is_single: bool,
    checks: bool,
) -> Ready:
    """Check everything, create the run folder, load the models. checks: of losslessness follow."""
    job = prepare(resolved, prompts, asked.permissions())
    if checks:
        refuse_unfit(job.plan, [job.plan.k])
    if is_single and (problem := job.too_long(0)):
        raise UsageError(problem, "shorten the prompt")
    where = environment(job.plan)
    folder = None
    if asked.output is not None and world.is_first:
        folder, resolved = _folder(asked.output, resolved, prompts, where)
    stages.expect(len(job.plan.stages))
    engine = build(job.plan, job.longest_prompt, stages.begin)
    return Ready(resolved, job, where, folder, engine)


def write(world: World, ready: Ready, asked: Asked, *, is_single: bool, checks: bool) -> ExitCode:
    """Run the prompts and show the results on rank 0; returns the exit code.

    is_single: the only prompt is on the command line, so the run fails if it cannot run. checks:
    whether to compare texts with those of the target alone.
    """
    watch = MachineWatch(ready.job.plan.device)
    outputs, metrics = _run(world, ready, asked, watch)
    if is_single and outputs[0].error is not None:
        if ready.folder is not None:
            # Nothing was run, so the folder stays free for the next run.
            ready.folder.forget("samples.jsonl")
        hint = "use more --num-blocks or fewer --max-new-tokens, or shorten the prompt"
        raise UsageError(f"the prompt cannot run: {outputs[0].error}", hint)
    check = _checked(world, ready, outputs) if checks else None
    with world.outside():
        found = [*watch.notices(), *failed_check(check)]
        if not asked.quiet:
            warn(found)
        _deliver(ready, outputs, metrics, found, check, as_json=asked.as_json)
        if check is not None and check["passed"] and not asked.quiet and world.is_first:
            typer.echo(check_line(check), err=True)
    if not asked.quiet:
        _summarise(world, ready, outputs, metrics, as_json=asked.as_json)
    # Torch's import may keep this frame alive, and the engine with it: free its graphs here.
    ready.engine.forget_rounds()
    if check is not None and not check["passed"]:
        return ExitCode.LOSSLESSNESS
    return ExitCode.OK if all(o.error is None for o in outputs) else ExitCode.PARTIAL


def _checked(world: World, ready: Ready, outputs: list[Output]) -> dict[str, Any]:
    """Compare a few prompts' texts with those of the target alone; this run's if it is greedy."""
    job, engine = ready.job.part(0, PROMPTS), ready.engine
    plan = job.plan
    ran = world.once(lambda: {o.index: o.token_ids for o in outputs if o.error is None})
    written = ran if plan.params.is_greedy else greedy_texts(engine, job, plan.k, world)
    plain = greedy_texts(engine, job, 0, world)
    check = LosslessCheck(str(plan.target.dtype).removeprefix("torch."))
    key = Key(plan.proposer, ready.recipe.run.batch_size, plan.k)
    check.compare(engine, key, texts_of(job, written, plain))
    return world.once(check.as_dict)  # other ranks have no logits of meaning


def _run(
    world: World, ready: Ready, asked: Asked, watch: MachineWatch
) -> tuple[list[Output], Metrics]:
    """Run the prompts; each output is shown and on disk as soon as it comes."""
    job, sinks = ready.job, []
    if world.is_first:
        sinks = sinks_for(job, ready.folder, as_json=asked.as_json, quiet=asked.quiet)
    show, finish = collector(job, sinks)

    def on_emit(emissions: list[Emission]) -> None:
        world.beat()
        watch.look()
        with world.outside():
            show(emissions)

    watch.begin()
    try:
        result = ready.engine.run(requests(job), job.plan.k, job.plan.params, on_emit)
        watch.look(at_end=True)
        return finish(), result.metrics
    finally:
        for sink in sinks:
            sink.close()


def _deliver(
    ready: Ready,
    outputs: list[Output],
    metrics: Metrics,
    found: list[Notice],
    check: dict[str, Any] | None,
    *,
    as_json: bool,
) -> None:
    """Finish the folder, write the document and report prompts that could not run."""
    document = generate_document(ready.recipe, ready.where, outputs, metrics, found)
    if check is not None:
        document["lossless_check"] = check
    if (folder := ready.folder) is not None:
        plan = ready.job.plan
        key = Key(plan.proposer, ready.recipe.run.batch_size, plan.k)
        folder.append("points.jsonl", point_record(outputs, metrics, key))
        folder.write("summary.json", to_json(document) + "\n")
        folder.close()
    if as_json:
        typer.echo(to_json(document))
    print_failures({o.index: o.error for o in outputs if o.error is not None})


def _summarise(
    world: World, ready: Ready, outputs: list[Output], metrics: Metrics, *, as_json: bool
) -> None:
    """Print a summary; on a terminal it includes a few tokens at k = 0 for comparison."""
    job = ready.job
    compared = job.plan.k > 0 and world.once(lambda: sys.stderr.isatty())
    print_summary(
        metrics,
        baseline(ready.engine, job, outputs) if compared else None,
        _remarks(job),
        tinted=not as_json and shows_live_text(job) and has_colour(sys.stdout),
        is_split=ready.recipe.target.tensor_parallel_size > 1,
    )


def _remarks(job: Job) -> list[str]:
    """Remarks that a reader needs to judge the text and the acceptance."""
    plan = job.plan
    rule = plan.recipe.speculation.acceptance
    found = [f"{rule} acceptance: {plan.remark}"] if plan.remark is not None else []
    random = {m.spec.role for m in plan.models if m.spec.load_format == "dummy"}
    if "target" in random:
        found.append("random weights: the text means nothing")
    elif random and plan.remark is None:
        found.append("random draft weights: the acceptance means nothing")
    return [*found, *plan.draft_remarks]


def _folder(
    path: Path, resolved: Recipe, prompts: list[Prompt], where: dict[str, Any]
) -> tuple[RunFolder, Recipe]:
    """A new run folder, and the recipe that runs again from it.

    The folder also keeps prompts that came from the command line or a pipe.
    """
    if resolved.data is not None:
        return RunFolder.create(path, resolved, where), resolved
    RunFolder(path).refuse_foreign(_PROMPTS)
    data = DataSection(path=os.path.abspath(path / _PROMPTS))
    resolved = resolved.model_copy(update={"data": data})
    folder = RunFolder.create(path, resolved, where)
    folder.write(_PROMPTS, jsonl_of(prompts))
    return folder, resolved
