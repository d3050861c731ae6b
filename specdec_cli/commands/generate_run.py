"""Runs `specdec generate` and shows its results. Imports torch, so other modules import it inside
functions."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from specdec_cli.backends.base import Backend, Finished, Session, Written
from specdec_cli.commands.options import Asked
from specdec_cli.commands.status import Stages, strictly, warn
from specdec_cli.core.figures import Metrics
from specdec_cli.errors import LOGGED, ExitCode, Notice, SpecdecError, UsageError
from specdec_cli.experiment.disk import or_setup_error, replace_file
from specdec_cli.experiment.folders.conclusions import CheckResult
from specdec_cli.experiment.folders.generate_folder import (
    SAMPLES,
    Kept,
    key_of,
    open_folder,
    point_of_run,
)
from specdec_cli.experiment.folders.record_lines import to_json
from specdec_cli.experiment.folders.records import Point, Sample, given
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.folders.settings_file import earlier_environment, unsaid
from specdec_cli.experiment.generation import (
    Job,
    Output,
    baseline,
    dated,
    output_of,
    prepare,
    requests,
)
from specdec_cli.experiment.lossless_check import (
    PROMPTS,
    LosslessCheck,
    failed_check,
    greedy_texts,
    refuse_unfit,
    texts_of,
)
from specdec_cli.experiment.machine import MachineWatch
from specdec_cli.experiment.measure import sample_of, units_of
from specdec_cli.experiment.points import point_metrics
from specdec_cli.experiment.preparing import looped, unlisted_end, warnings_of_job
from specdec_cli.experiment.served import engine_fields, remarks_of
from specdec_cli.experiment.statistics.promise import check_line
from specdec_cli.launch.world import World
from specdec_cli.prompts import jsonl_of, next_turn
from specdec_cli.prompts.types import PromptSet
from specdec_cli.recipe import Recipe
from specdec_cli.stages import FIRST_TOKEN, begin_stage
from specdec_cli.terminal.render import has_colour, print_summary
from specdec_cli.terminal.sinks import collector, shows_live_text, sinks_for
from specdec_cli.text import say


@dataclass(frozen=True, slots=True)
class Ready:
    """Everything that a run needs.

    recipe: the recipe to record with the results. Running it again repeats the run.
    where: the facts of the environment, to record with the results.
    kept: the run folder, if the user asked for one, and the samples that it already holds.
    session: the loaded models; None if nothing is left to do.
    """

    recipe: Recipe
    job: Job
    where: dict[str, Any]
    kept: Kept
    notices: list[Notice]
    session: Session | None

    @property
    def folder(self) -> RunFolder | None:
        return self.kept.folder

    @property
    def left(self) -> Job:
        """The job, with only the prompts that are not done yet."""
        return self.job.only(lambda index: index not in self.kept.done)


@dataclass(frozen=True, slots=True)
class Own:
    """The options that only this command has.

    checks: whether to compare the texts with those that the target writes without a draft.
    is_single: whether the command line gives exactly one prompt. If so, the command fails when that
        prompt cannot run.
    strict: whether the run counts as partial if a warning says that its timings were disturbed.
    """

    resume: bool
    next_turns: Path | None
    checks: bool
    is_single: bool
    strict: bool


def get_ready(
    backend: Backend,
    world: World,
    resolved: Recipe,
    found: PromptSet,
    asked: Asked,
    own: Own,
    stages: Stages,
) -> Ready:
    """Check the recipe, the options and the prompts, and create or resume the run folder if one is
    given. Then load the models, unless nothing is left to run or check."""
    resolved = resolved.model_copy(update={"data": found.data})
    job = prepare(backend, resolved, found, asked.permissions())
    resolved = dated(resolved, job)
    if own.checks:
        refuse_unfit(job.plan, [job.plan.k])
    if own.is_single and (problem := job.too_long(0)):
        raise UsageError(problem, "shorten the prompt")
    begin_stage("recording the environment")
    where = backend.environment(job.plan)
    notices = [*found.notices, *warnings_of_job(job, found.chat)]
    kept = Kept()
    if (path := asked.output) is not None:
        if world.is_first:
            kept = open_folder(path, resolved, job, where, notices, found.own, resume=own.resume)
        # Every rank must skip the prompts whose outputs are in the folder.
        shared = world.once(lambda: replace(kept, folder=None))
        kept = kept if world.is_first else shared
        notices += unsaid(kept.notices, notices)
        if len(kept.done) == len(job.prompts):  # nothing is left to run
            where = earlier_environment(path, where)
    ready = Ready(resolved, job, where, kept, notices, None)
    if not ready.left.prompts and not own.checks:
        return ready
    stages.expect(len(job.plan.stages))
    return replace(ready, session=backend.open_session(job.plan, job.longest_prompt, stages.begin))


def write(world: World, ready: Ready, asked: Asked, own: Own) -> ExitCode:
    """Run the prompts and show the results on rank 0; returns the exit code."""
    watch = MachineWatch(ready.job.plan.device)
    with world.outside():
        warn(ready.notices)
    try:
        outputs, metrics, samples = _run(world, ready, asked, watch)
    except BaseException:
        with suppress(SpecdecError, OSError):  # the first error matters more
            # The command that resumes the run must know what disturbed its first part.
            ready.kept.keep(watch.notices())
        raise
    if own.is_single and ready.job.backend.is_native and outputs[0].error is not None:
        if ready.folder is not None:
            # Nothing ran. Remove the failed sample, so that another run can use the folder.
            ready.folder.forget(SAMPLES)
        hint = "use more --num-blocks or fewer --max-new-tokens, or shorten the prompt"
        raise UsageError(f"the prompt cannot run: {outputs[0].error}", hint)
    check = _checked(world, ready, outputs) if own.checks else None
    with world.outside():
        of_machine = watch.notices() if ready.session is not None else []
        ready.kept.keep(of_machine)
        found = [*of_machine, *failed_check(check)] if ready.session is not None else []
        found += remarks_of([samples])
        if ready.job.backend.is_native:
            found += [*unlisted_end(ready.job, outputs), *looped(ready.job, outputs)]
        warn(found)
        notices = [*ready.notices, *found]
        document = {
            "schema": "specdec.generate/1",
            "recipe": ready.recipe.model_dump(mode="json"),
            "environment": ready.where,
            "outputs": outputs,
            "metrics": metrics,
            "warnings": [*notices, *LOGGED],
            **given(lossless_check=check),
        }
        of_engine = engine_fields(samples.values())
        _keep(ready, document, point_of_run(outputs, metrics, key_of(ready.job), of_engine))
        # The run folder comes first, so that a failure to write this file loses no results. The
        # document comes after both, because a failed command prints another one.
        if own.next_turns is not None and world.is_first:
            with or_setup_error(f"cannot write {own.next_turns}"):
                replace_file(own.next_turns, _next_turns(ready.job, outputs).encode())
        if asked.as_json:
            typer.echo(to_json(document))
        for one in outputs:
            if one.error is not None:
                say(f"prompt {one.index} failed: {one.error}")
        if check is not None and check.passed and not asked.quiet and world.is_first:
            say(check_line(check))
    if not asked.quiet:
        _summarise(world, ready, outputs, metrics, as_json=asked.as_json)
    # Torch's import may keep a reference to this stack frame, so the engine may not be freed when
    # this function returns. Free its CUDA graphs now.
    if ready.session is not None:
        ready.session.forget_rounds()
    if check is not None and not check.passed:
        return ExitCode.LOSSLESSNESS
    code = ExitCode.OK if all(o.error is None for o in outputs) else ExitCode.PARTIAL
    return world.once(lambda: strictly(code, notices, strict=own.strict))


def _checked(world: World, ready: Ready, outputs: list[Output]) -> CheckResult:
    """Compare the texts of the first few prompts with those that the target writes without a draft.
    If the run is greedy, its own texts are compared. If it samples, greedy texts are generated for
    the comparison."""
    job, session = ready.job.part(0, PROMPTS), ready.session
    assert session is not None, "a run with a check has a session"
    plan = job.plan
    ran = world.once(lambda: {o.index: o.token_ids for o in outputs if o.error is None})
    written = ran if plan.params.is_greedy else greedy_texts(session, job, plan.k, world)
    plain = greedy_texts(session, job, 0, world)
    check = LosslessCheck(plan.dtype_name, plan.params)
    check.compare(session, key_of(job), texts_of(job, written, plain))
    # Only rank 0 has valid logits, so every rank returns rank 0's result.
    return world.once(lambda: check.result)


def _run(
    world: World, ready: Ready, asked: Asked, watch: MachineWatch
) -> tuple[list[Output], Metrics, dict[int, Sample]]:
    """Run the prompts that are not done yet. Each output is shown and written to disk as soon as it
    is complete.

    Returns all outputs, their metrics and the samples. For resumed runs and runs on a server, the
    metrics are computed from all samples, including those that the folder already held. Otherwise
    the engine computes the metrics.
    """
    job, sinks, done = ready.job, [], ready.kept.done
    if world.is_first:
        sinks = sinks_for(job, ready.folder, as_json=asked.as_json, quiet=asked.quiet)
    new = dict[int, Finished]()
    is_silent = True
    earlier = [
        output_of(job, p, sample, sample.seconds[0])
        for p in job.prompts
        if (sample := done.get(p.index)) is not None
    ]

    def on_round(written: Sequence[Written], finished: list[Finished]) -> None:
        nonlocal is_silent
        if is_silent and any(one.token_ids for one in written):
            is_silent = False
            begin_stage(FIRST_TOKEN)
        world.beat()
        watch.look()
        new.update({one.index: one for one in finished})
        with world.outside():
            show(written, finished)

    begin_stage("running the prompts")
    watch.begin()
    try:
        show, finish = collector(job, sinks, earlier)
        metrics = None
        if ready.session is not None:
            plan = job.plan
            left = ready.left
            # A server's answers are only written when all requests of a batch are done. So send
            # small batches: if the process is killed, only the answers of one batch are lost.
            units = [left] if job.backend.is_native else units_of(left, plan.recipe.run.batch_size)
            for unit in units:
                metrics = ready.session.run(requests(unit), plan.k, plan.params, on_round)
            watch.look(at_end=True)
        key, limit = key_of(job), job.plan.params.max_new_tokens
        peak = job.backend.peak_memory(job.plan)
        of_new = [sample_of(key, None, [one], limit, peak) for one in new.values()]
        samples = {**done, **{sample.index: sample for sample in of_new}}
        if done or metrics is None:
            metrics = point_metrics(list(samples.values()), key)
        else:
            metrics = metrics.model_copy(update={"peak_memory_bytes": peak})
        return finish(), metrics, samples
    finally:
        for sink in sinks:
            sink.close()


def _next_turns(job: Job, outputs: list[Output]) -> str:
    """Return the text of a .jsonl file that continues the conversations. Each line has a
    conversation so far, its answer and the user's next message. Conversations that failed or have
    no further turn are left out. So is the recipe's chat template, so that the next recipe's
    applies."""
    pairs = zip(job.prompts, outputs, strict=True)
    found = [next_turn(prompt, output.text) for prompt, output in pairs if output.error is None]
    data = job.plan.recipe.data
    ours = () if data is None or data.chat_template is None else ("chat_template",)
    return jsonl_of(
        replace(prompt, template={k: one for k, one in prompt.template.items() if k not in ours})
        for prompt in found
        if prompt is not None
    )


def _keep(ready: Ready, document: dict[str, Any], point: Point) -> None:
    """Write the results to the run folder, if there is one, and close it."""
    if (folder := ready.folder) is not None:
        if ready.left.prompts or not (folder.path / "points.jsonl").exists():
            folder.append("points.jsonl", point)
        folder.write("summary.json", to_json(document) + "\n")
        folder.close()


def _summarise(
    world: World, ready: Ready, outputs: list[Output], metrics: Metrics, *, as_json: bool
) -> None:
    """Print a summary. On a terminal, our own engine also decodes a few tokens at k = 0, so that
    the summary can tell whether speculation pays."""
    job = ready.job
    session = ready.session
    can_compare = session is not None and job.plan.k > 0 and job.backend.is_native
    compared = can_compare and world.once(lambda: sys.stderr.isatty())
    print_summary(
        metrics,
        baseline(session, job, outputs) if session is not None and compared else None,
        _remarks(job),
        tinted=not as_json and shows_live_text(job) and has_colour(sys.stdout),
    )


def _remarks(job: Job) -> list[str]:
    """Return remarks on how far the text and the acceptance can be trusted."""
    plan = job.plan
    rule = plan.recipe.speculation.acceptance
    found = [f"{rule} acceptance: {plan.remark}"] if plan.remark is not None else []
    random = plan.random_roles
    if "target" in random:
        found.append("random weights: the text is meaningless")
    elif random and plan.remark is None:
        found.append("random draft weights: the acceptance is meaningless")
    return [*found, *(reading.told for reading in plan.readings)]
