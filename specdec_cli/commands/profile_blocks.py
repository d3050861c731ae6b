"""`specdec profile-blocks`: how many KV blocks fit on each rank beside both models?

Parses, measures or estimates, and shows; the work is done elsewhere.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

import specdec_cli
from specdec_cli.commands import options
from specdec_cli.commands.importing import importing
from specdec_cli.commands.status import waiting
from specdec_cli.errors import SetupError, SpecdecError, UsageError
from specdec_cli.launch.world import Place, World, join
from specdec_cli.text import inert

T = TypeVar("T", int, float)

Estimate = Annotated[
    bool,
    typer.Option(
        "--estimate", help="Estimate from configs: no weights, no ranks; options may be lists."
    ),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        "--device-memory",
        metavar="SIZE",
        help="With --estimate: memory of each GPU, such as 80GiB.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="N",
        min=1,
        help="Tokens per sequence, output included. Default: the recipe's longest.",
    ),
]
DraftTPs = Annotated[
    str | None,
    typer.Option("--draft-tp", metavar="LIST", help="Ranks of the draft, such as 1,2,4."),
]
Ks = Annotated[
    str | None,
    typer.Option("-k", "--num-speculative-tokens", metavar="LIST", help="Proposed tokens a round."),
]
BlockSizes = Annotated[
    str | None, typer.Option("--block-size", metavar="LIST", help="Tokens per KV cache block.")
]
Utilizations = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory-utilization", metavar="LIST", help="Fraction of a GPU's memory to use."
    ),
]

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MOST_POINTS = 1000


def profile_blocks(
    ctx: typer.Context,
    recipe: options.RecipeArgument = None,
    estimate: Estimate = False,
    device_memory: DeviceMemory = None,
    context: Context = None,
    target: options.Target = None,
    draft: options.Draft = None,
    target_tp: options.TargetTP = None,
    draft_tp: DraftTPs = None,
    num_speculative_tokens: Ks = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    max_new_tokens: options.MaxNewTokens = None,
    ignore_eos: options.IgnoreEos = None,
    batch_size: options.BatchSize = None,
    seed: options.Seed = None,
    num_blocks: options.NumBlocks = None,
    block_size: BlockSizes = None,
    gpu_memory_utilization: Utilizations = None,
    sets: options.Set = None,
    trust_remote_code: options.TrustRemoteCode = False,
    allow_pickle: options.AllowPickle = False,
    plugin: options.Plugin = None,
    as_json: options.Json = False,
    output: options.Output = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Report how many KV blocks fit on each rank beside both models, and what limits them.

    Loads the models on their ranks and runs the largest passes that the recipe allows; --estimate
    only reads configs. Without a recipe the bundled demo pair is profiled.
    """
    from specdec_cli.models.ahead import check_ahead

    options.set_up_logging(quiet=quiet, verbose=verbose)
    lists = {
        "draft_tp": listed(draft_tp, "--draft-tp", int),
        "block_size": listed(block_size, "--block-size", int),
        "gpu_memory_utilization": listed(gpu_memory_utilization, "--gpu-memory-utilization", float),
        "num_speculative_tokens": listed(num_speculative_tokens, "-k", int),
    }
    if not estimate:
        if device_memory is not None:
            raise UsageError("--device-memory needs --estimate: a measurement uses this machine")
        for name, values in lists.items():
            if len(values) > 1:
                flag = options.OPTION_KEYS[name][0]
                raise UsageError(f"{flag}: several values need --estimate")
    chosen = options.given(ctx, *lists)

    plugins = options.load_plugins(plugin)

    def resolve(point: dict[str, object]) -> "specdec_cli.recipe.Recipe":
        return options.resolve(recipe, sets, chosen | point)

    permissions = (trust_remote_code, allow_pickle, plugins)
    place: Place = ctx.obj
    if estimate:
        if not place.is_first:
            return  # every process would find the same, and one has to write it
        memory = parse_bytes(device_memory) if device_memory is not None else None
        with waiting("estimating", quiet=quiet):
            resolved, document = _estimated(resolve, lists, memory, context, permissions)
        options.warn_of_unused(resolved, has_draft=draft is not None)
        _show(document, resolved, as_json=as_json, output=output, quiet=quiet)
        return
    resolved = resolve(next(_points(lists)))
    if place.rank is None or place.rank.tells_user:
        options.warn_of_unused(resolved, has_draft=draft is not None)
    num_ranks, timeout_s = resolved.target.tensor_parallel_size, resolved.run.timeout_s

    def read() -> "list[specdec_cli.prompts.Prompt]":
        return _prompts(resolved, context)

    if place.must_start(num_ranks):
        prompts = read()
        check_ahead(resolved)
        raise typer.Exit(place.start(num_ranks, timeout_s=timeout_s, inputs=prompts))
    with join(place, num_ranks, device=resolved.run.device, timeout_s=timeout_s) as world:
        prompts = world.inputs(read)
        kept = output if world.is_first else None
        document = _measured(world, resolved, prompts, context, permissions, kept, quiet)
        if world.is_first:
            with world.outside():
                _show(document, resolved, as_json=as_json, output=output, quiet=quiet)


def _measured(
    world: World,
    resolved: "specdec_cli.recipe.Recipe",
    prompts: "list[specdec_cli.prompts.Prompt]",
    context: int | None,
    permissions: tuple[bool, bool, tuple[str, ...]],
    output: Path | None,
    quiet: bool,
) -> dict[str, object]:
    """The document, on rank 0. output: the folder to keep it in, created before measuring."""
    with waiting("getting ready", quiet=quiet) as stages:
        with importing():
            from specdec_cli.engine.plan import Permissions, plan
            from specdec_cli.experiment.memory import document, measure_blocks
            from specdec_cli.experiment.results import environment
            from specdec_cli.experiment.run_folder import RunFolder

        planned = plan(resolved, Permissions(*permissions))
        if output is not None:
            where = environment(planned.device, planned.target.dtype, planned.execution)
            RunFolder.create(output, resolved, where).close()
        profile = measure_blocks(planned, prompts, context, stages.begin, stages.expect)
        # Before the timeouts of `ready` begin: the document describes the draft at other degrees.
        found = document(resolved, profile) if world.is_first else {}
    world.ready()
    return found


def _estimated(
    resolve: "Callable[[dict[str, object]], specdec_cli.recipe.Recipe]",
    lists: Mapping[str, Sequence[object]],
    memory: int | None,
    context: int | None,
    permissions: tuple[bool, bool, tuple[str, ...]],
) -> "tuple[specdec_cli.recipe.Recipe, dict[str, object]]":
    """The document of the first point, with all of them as rows when there are several.

    Raises `SetupError` if nothing fits at any of them, and the first point's problem if all of them
    are skipped.
    """
    with importing():
        from specdec_cli.engine.plan import Permissions
        from specdec_cli.experiment.memory import Estimator, document, point, settings

    size = resolve({"draft_tp": 1 if lists["draft_tp"][0] is not None else None})
    whole = size.target.tensor_parallel_size
    rows: list[dict[str, object]] = []
    found: tuple[specdec_cli.recipe.Recipe, dict[str, object]] | None = None
    problem: SpecdecError | None = None
    estimator = Estimator(Permissions(*permissions), context, memory)
    for values in _points(lists):
        degree = values["draft_tp"]
        if isinstance(degree, int) and (degree < 1 or whole % degree):
            reason = f"draft TP {degree} does not divide target TP {whole}"
            row = {"k": values["num_speculative_tokens"], **values, "status": "skipped"}
            del row["num_speculative_tokens"]
            rows.append(_with_defaults(row, size) | {"reason": reason})
            problem = problem or UsageError(f"--draft-tp: {reason}")
            continue
        resolved = resolve(values)
        prompts = _prompts(resolved, context)
        try:
            profile = estimator.estimate(resolved, prompts)
        except SetupError as error:  # the draft may still split over the other degrees
            if len(lists["draft_tp"]) == 1:
                raise
            rows.append(settings(resolved) | {"status": "skipped", "reason": error.message})
            problem = problem or error
            continue
        rows.append(point(resolved, profile))
        if rows[-1]["status"] == "ok":
            found = found or (resolved, document(resolved, profile))
    if found is None:
        refused = next((row for row in rows if row["status"] == "oom"), None)
        if refused is None:
            assert problem is not None, "every row was skipped"
            raise problem
        raise SetupError(
            str(refused["reason"]),
            "use smaller models, a smaller dtype, more ranks, or more memory",
        )
    return found[0], {**found[1], "points": rows}


def _with_defaults(
    row: dict[str, object], resolved: "specdec_cli.recipe.Recipe"
) -> dict[str, object]:
    """`row`, with the recipe's settings where no option gave a value."""
    from specdec_cli.experiment.memory import settings

    return settings(resolved) | {key: value for key, value in row.items() if value is not None}


def _show(
    document: dict[str, object],
    resolved: "specdec_cli.recipe.Recipe",
    *,
    as_json: bool,
    output: Path | None,
    quiet: bool,
) -> None:
    from specdec_cli.experiment.results import to_json
    from specdec_cli.experiment.run_folder import RunFolder
    from specdec_cli.terminal.memory import print_profile

    if output is not None:
        from specdec_cli.report.memory import write_memory_picture

        where = document["environment"]
        assert isinstance(where, dict)
        folder = RunFolder.create(output, resolved, where)
        folder.write("summary.json", to_json(document) + "\n")
        folder.close()
        try:
            import matplotlib  # noqa: F401

            write_memory_picture(document, output / "memory.png")
        except ImportError:
            if not quiet:
                typer.echo("warning: no memory.png without the package matplotlib", err=True)
    if as_json:
        typer.echo(to_json(document))
        return
    print_profile(document)
    if output is not None and not quiet:
        typer.echo(inert(f"written to {output}"), err=True)


def _prompts(
    resolved: "specdec_cli.recipe.Recipe", context: int | None
) -> "list[specdec_cli.prompts.Prompt]":
    """The recipe's prompts, if only they determine the length of sequences."""
    if context is not None or resolved.cache.max_model_len is not None or resolved.data is None:
        return []
    from specdec_cli.prompts import as_conversations, load_prompts

    data = resolved.data
    return as_conversations(load_prompts(data), data.chat, data.system)


def _points(lists: Mapping[str, Sequence[object]]) -> Iterator[dict[str, object]]:
    """Every combination of the lists' values."""
    count = 1
    for values in lists.values():
        count *= len(values)
    if count > _MOST_POINTS:
        raise UsageError(f"the lists make {count} combinations; at most {_MOST_POINTS} are taken")
    for chosen in itertools.product(*lists.values()):
        yield dict(zip(lists, chosen, strict=True))


def listed(text: str | None, flag: str, convert: Callable[[str], T]) -> Sequence[T | None]:
    """Parse `1,2,4` into distinct numbers; a single None stands for an option not given."""
    if text is None:
        return [None]
    try:
        return list(dict.fromkeys(convert(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"{flag}: expected numbers such as 1,2,4, got {text!r}") from None


def parse_bytes(text: str) -> int:
    """Parse `80GiB`, `141G` or a number of bytes; GB and the like are powers of 1000."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmgt]?)(i?b)?\s*", text, re.I)
    if match is None or not (number := float(match[1])):
        raise UsageError(f"--device-memory: expected a size such as 80GiB, got {text!r}")
    unit, suffix = match[2].lower(), (match[3] or "").lower()
    if unit and suffix == "b":
        return int(number * 1000 ** "kmgt".index(unit) * 1000)
    return int(number * _UNITS[unit])
