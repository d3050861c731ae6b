"""`specdec generate`: what does this pair write, how fast, how much of the draft was accepted?

Parses, prepares, runs and shows; the work is done elsewhere.
"""

import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import specdec_cli.experiment
from specdec_cli.commands import inputs, options
from specdec_cli.commands.importing import importing
from specdec_cli.commands.joining import joined
from specdec_cli.commands.options import Asked, option, shared
from specdec_cli.commands.status import waiting
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.launch.world import World
from specdec_cli.text import is_unicode

_PROMPTS = "prompts.jsonl"  # in a run folder: prompts that no file of the user holds

Prompts = Annotated[
    list[str] | None, option("--prompt", "TEXT", "Text of a prompt; may be repeated.")
]
_PROMPT_FILE = "File of prompts: .txt (one a line), .jsonl, .json, .csv, .tsv or .parquet."
PromptFile = Annotated[str | None, option("--prompt-file", "FILE", _PROMPT_FILE)]


@shared()
def generate(
    asked: Asked,
    prompt: Prompts = None,
    prompt_file: PromptFile = None,
    chat: inputs.Chat = None,
    system: inputs.System = None,
    limit: options.Limit = None,
    skip_bad: options.SkipBad = False,
) -> None:
    """Write text with a draft and a target model, and report what was accepted.

    Prompts come from --prompt, --prompt-file, standard input if it is piped, or the recipe's
    data. `-k 0` decodes without a draft. Without a recipe the bundled demo pair runs.
    """
    from specdec_cli.prompts import as_conversations

    source = _Source(prompt or [], prompt_file, limit, skip_bad)
    resolved = asked.resolve({"prompt_file": source.recipe_path})
    use_chat, opening = inputs.chat_of(chat, system, resolved.data)

    def read() -> "tuple[list[specdec_cli.prompts.Prompt], specdec_cli.recipe.DataSection | None]":
        found, data = _prompts(source, resolved.data, options.parse_sets(asked.sets or ()))
        if data is not None:
            data = data.model_copy(update={"chat": use_chat, "system": opening})
        return as_conversations(found, use_chat, opening), data

    asked.warn_of_unused(resolved, has_draft=asked.given["draft"] is not None)
    with joined(asked.place, [resolved], read) as (world, (prompts, data)):
        named = resolved.model_copy(update={"data": data})
        is_single = bool(prompt) and len(prompts) == 1
        code = _write(world, named, prompts, asked, is_single=is_single)
    raise typer.Exit(code)


def _write(
    world: World,
    resolved: "specdec_cli.recipe.Recipe",
    prompts: "list[specdec_cli.prompts.Prompt]",
    asked: Asked,
    *,
    is_single: bool,
) -> ExitCode:
    """Run the prompts and show the results on rank 0; returns the exit code.

    is_single: the only prompt is on the command line, so the run fails if it cannot run.
    """
    ready = _get_ready(world, resolved, prompts, asked, is_single=is_single)
    written = _run(world, ready, asked)
    outputs = written.outputs
    if is_single and outputs[0].error is not None:
        if ready.folder is not None:
            # Nothing was run, so the folder stays free for the next run.
            ready.folder.forget("samples.jsonl")
        hint = "use more --num-blocks or fewer --max-new-tokens, or shorten the prompt"
        raise UsageError(f"the prompt cannot run: {outputs[0].error}", hint)
    with world.outside():
        _deliver(ready, written, as_json=asked.as_json)
    if not asked.quiet:
        _summarise(world, ready, written, as_json=asked.as_json)
    # Torch's import may keep this frame alive, and the engine with it: free its graphs here.
    ready.engine.forget_rounds()
    return ExitCode.OK if all(o.error is None for o in outputs) else ExitCode.PARTIAL


def _get_ready(
    world: World,
    resolved: "specdec_cli.recipe.Recipe",
    prompts: "list[specdec_cli.prompts.Prompt]",
    asked: Asked,
    *,
    is_single: bool,
) -> "specdec_cli.experiment.generation.Ready":
    """Check everything, create the run folder, load the models."""
    with waiting("getting ready", quiet=asked.quiet) as stages:
        with importing():
            from specdec_cli.engine.build import build
            from specdec_cli.experiment.generation import Ready, prepare
            from specdec_cli.experiment.results import environment

        job = prepare(resolved, prompts, asked.permissions())
        if is_single and (problem := job.too_long(0)):
            raise UsageError(problem, "shorten the prompt")
        where = environment(job.plan.device, job.plan.target.dtype, job.plan.execution)
        folder = None
        if asked.output is not None and world.is_first:
            folder, resolved = _folder(asked.output, resolved, prompts, where)
        stages.expect(len(job.plan.stages))
        engine = build(job.plan, job.longest_prompt, stages.begin)
    world.ready()
    return Ready(resolved, job, where, folder, engine)


def _run(
    world: World, ready: "specdec_cli.experiment.generation.Ready", asked: Asked
) -> "specdec_cli.experiment.generation.Written":
    """Run the prompts; each output is shown and on disk as soon as it comes."""
    from specdec_cli.engine.run import Emission
    from specdec_cli.experiment.generation import Written, requests
    from specdec_cli.terminal.sinks import collector, sinks_for

    job, sinks = ready.job, []
    if world.is_first:
        sinks = sinks_for(job, ready.folder, as_json=asked.as_json, quiet=asked.quiet)
    show, finish = collector(job, sinks)

    def on_emit(emissions: list[Emission]) -> None:
        world.beat()
        with world.outside():
            show(emissions)

    try:
        result = ready.engine.run(requests(job), job.plan.k, job.plan.params, on_emit)
        return Written(finish(), result.metrics)
    finally:
        for sink in sinks:
            sink.close()


def _deliver(
    ready: "specdec_cli.experiment.generation.Ready",
    written: "specdec_cli.experiment.generation.Written",
    *,
    as_json: bool,
) -> None:
    """Finish the folder, write the document and report prompts that could not run."""
    from specdec_cli.experiment.results import generate_document, point_record, to_json
    from specdec_cli.terminal.render import print_failures

    outputs = written.outputs
    document = generate_document(ready.recipe, ready.where, outputs, written.metrics)
    if (folder := ready.folder) is not None:
        plan = ready.job.plan
        setting = (plan.proposer, plan.k, ready.recipe.run.batch_size)
        folder.append("points.jsonl", point_record(outputs, written.metrics, *setting))
        folder.write("summary.json", to_json(document) + "\n")
        folder.close()
    if as_json:
        typer.echo(to_json(document))
    print_failures({o.index: o.error for o in outputs if o.error is not None})


def _summarise(
    world: World,
    ready: "specdec_cli.experiment.generation.Ready",
    written: "specdec_cli.experiment.generation.Written",
    *,
    as_json: bool,
) -> None:
    """Print a summary; on a terminal it includes a few tokens at k = 0 for comparison."""
    from specdec_cli.experiment.generation import baseline
    from specdec_cli.terminal.render import has_colour, print_summary
    from specdec_cli.terminal.sinks import shows_live_text

    job = ready.job
    compared = job.plan.k > 0 and world.once(lambda: sys.stderr.isatty())
    print_summary(
        written.metrics,
        baseline(ready.engine, job, written.outputs) if compared else None,
        _remarks(job),
        tinted=not as_json and shows_live_text(job) and has_colour(sys.stdout),
        is_split=ready.recipe.target.tensor_parallel_size > 1,
    )


def _remarks(job: "specdec_cli.experiment.generation.Job") -> list[str]:
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
    path: Path,
    resolved: "specdec_cli.recipe.Recipe",
    prompts: "list[specdec_cli.prompts.Prompt]",
    where: dict[str, Any],
) -> "tuple[specdec_cli.experiment.run_folder.RunFolder, specdec_cli.recipe.Recipe]":
    """A new run folder, and the recipe that runs again from it.

    The folder also keeps prompts that came from the command line or a pipe.
    """
    from specdec_cli.experiment.run_folder import RunFolder
    from specdec_cli.prompts import jsonl_of
    from specdec_cli.recipe import DataSection

    if resolved.data is not None:
        return RunFolder.create(path, resolved, where), resolved
    RunFolder(path).refuse_foreign(_PROMPTS)
    data = DataSection(path=os.path.abspath(path / _PROMPTS))
    resolved = resolved.model_copy(update={"data": data})
    folder = RunFolder.create(path, resolved, where)
    folder.write(_PROMPTS, jsonl_of(prompts))
    return folder, resolved


@dataclass(frozen=True, slots=True)
class _Source:
    """The options that say where prompts are."""

    given: list[str]
    file: str | None
    limit: int | None
    skip_bad: bool

    @property
    def recipe_path(self) -> str | None:
        """The prompt file, if it is the only source of prompts and a recipe can name it."""
        file = self.file
        if self.given or file is None or file == "-":
            return None
        return file if file.strip() and is_unicode(file) and "\0" not in file else None


def _prompts(
    source: _Source,
    data: "specdec_cli.recipe.DataSection | None",
    sets: Mapping[str, object],
) -> "tuple[list[specdec_cli.prompts.Prompt], specdec_cli.recipe.DataSection | None]":
    """Prompts from the options, else from a pipe, else from the recipe's data.

    Also returns the data section that names them, so that the resolved recipe never names prompts
    that were not run; None for prompts that no recipe can name.
    """
    from specdec_cli.prompts import load_prompts, read_prompts

    if (file := source.recipe_path) is not None:
        assert data is not None and data.path == file
        data = _limited(inputs.of_another_file(data, sets), source.limit)
        found = load_prompts(data, skip_bad=source.skip_bad, is_file=True)
        return found, data.model_copy(update={"path": os.path.abspath(file)})
    limit, skip_bad = source.limit, source.skip_bad
    if source.given or source.file is not None:
        stdin = sys.stdin if source.file == "-" else None
        return (
            read_prompts(source.given, source.file, stdin, limit=limit, skip_bad=skip_bad),
            None,
        )
    if _is_piped() and (piped := read_prompts([], None, sys.stdin, limit=limit, skip_bad=skip_bad)):
        return piped, None
    if data is None:
        raise UsageError("no prompts", "pass --prompt or --prompt-file, or pipe them in")
    data = _limited(data, limit)
    return load_prompts(data, skip_bad=skip_bad), data


def _limited(
    data: "specdec_cli.recipe.DataSection", limit: int | None
) -> "specdec_cli.recipe.DataSection":
    return data if limit is None else data.model_copy(update={"limit": limit})


def _is_piped() -> bool:
    """True if standard input is a pipe or a file, not closed, a terminal or /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
