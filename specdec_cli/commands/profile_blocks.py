"""`specdec profile-blocks`: reports how many KV blocks fit on each rank beside both models.

Parses the command line and shows the results; `experiment.memory` does the work.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import specdec_cli
from specdec_cli.commands import options
from specdec_cli.commands.options import Asked, Prompts, option, shared
from specdec_cli.commands.starting import importing, joined
from specdec_cli.commands.status import show, waiting, warn
from specdec_cli.commands.unused import warn_of_unused
from specdec_cli.errors import SetupError, SpecdecError, UsageError
from specdec_cli.launch.world import World
from specdec_cli.text import parse_bytes, say

T = TypeVar("T", int, float)

_ESTIMATE = "Estimate from configs: no weights, no ranks; options may be lists."
Estimate = Annotated[bool, option("--estimate", None, _ESTIMATE)]
_DEVICE_MEMORY = "With --estimate: memory of each GPU, such as 80GiB or 24GiB,80GiB."
DeviceMemory = Annotated[str | None, option("--device-memory", "LIST", _DEVICE_MEMORY)]
_MEMORY = "With --estimate: memory of each GPU, or of the host if the device is a CPU."
Memory = Annotated[str | None, option("--memory", "SIZE", _MEMORY)]
_CONTEXT = (
    "Tokens per sequence, output included. Default: what the longest prompt needs, else the "
    "models' limit."
)
Context = Annotated[int | None, option("--context", "N", _CONTEXT, min=1)]
_DRAFT_TPS = "Ranks of the draft, such as 1,2,4."
DraftTPs = Annotated[str | None, option("--draft-tp", "LIST", _DRAFT_TPS)]
Ks = Annotated[
    str | None, option("-k --k --num-speculative-tokens", "LIST", "Proposed tokens a round.")
]
BlockSizes = Annotated[str | None, option("--block-size", "LIST", "Tokens per KV cache block.")]
_UTILIZATIONS = "Fraction of a GPU's memory to use."
Utilizations = Annotated[str | None, option("--gpu-memory-utilization", "LIST", _UTILIZATIONS)]

_MOST_POINTS = 1000
_SUMMARY, _PICTURE = "summary.json", "memory.png"


@shared()
def profile_blocks(
    asked: Asked,
    source: Prompts,
    estimate: Estimate = False,
    device_memory: DeviceMemory = None,
    memory: Memory = None,
    context: Context = None,
    draft_tp: DraftTPs = None,
    num_speculative_tokens: Ks = None,
    block_size: BlockSizes = None,
    gpu_memory_utilization: Utilizations = None,
) -> None:
    """Report how many KV blocks fit on each rank beside both models, and what limits them.

    Loads the models on their ranks and runs the largest passes that the recipe allows; --estimate
    only reads configs. Without a recipe the bundled demo pair is profiled.
    """
    from specdec_cli.commands.reading import recipe_options

    lists = {
        "draft_tp": listed(draft_tp, "--draft-tp", int),
        "block_size": listed(block_size, "--block-size", int),
        "gpu_memory_utilization": listed(gpu_memory_utilization, "--gpu-memory-utilization", float),
        "num_speculative_tokens": listed(num_speculative_tokens, "-k", int),
    }
    if not estimate:
        for flag, size in (("--device-memory", device_memory), ("--memory", memory)):
            if size is not None:
                raise UsageError(f"{flag} needs --estimate: without it, this machine is measured")
        for name, values in lists.items():
            if len(values) > 1:
                flag = options.OPTION_KEYS[name][0]
                raise UsageError(f"{flag}: several values need --estimate")
    own = {name: values[0] for name, values in lists.items()}
    tell_unused = partial(
        warn_of_unused,
        replace(asked, given={**asked.given, **own}),
        has_draft=asked.given["draft"] is not None,
        unread=("run.repeats", "run.warmup"),
    )
    if estimate:
        if not asked.place.is_first:
            return  # every process would compute the same estimate, and only one may write it
        rooms = _rooms(device_memory, memory)
        with waiting("estimating", quiet=asked.hides_progress), _naming_shapes():
            resolved, document = _estimated(asked, source, lists, rooms, context)
        tell_unused([resolved])
        _show(document, resolved, asked)
        return
    resolved = asked.resolve(recipe_options(source) | next(_points(lists)))
    tell_unused([resolved])
    with joined(asked.place, [resolved], lambda: _prompts(source, resolved, asked, context)) as (
        world,
        prompts,
    ):
        document = _measured(world, resolved, prompts, context, asked)
        if world.is_first:
            with world.outside():
                _show(document, resolved, asked)


def _measured(
    world: World,
    resolved: "specdec_cli.recipe.Recipe",
    prompts: "list[specdec_cli.prompts.Prompt]",
    context: int | None,
    asked: Asked,
) -> dict[str, object]:
    """Measure on all ranks. Return the results document on rank 0, and {} on other ranks.

    If there is an output folder, rank 0 creates it as a run folder before measuring.
    """
    with waiting("getting ready", quiet=asked.hides_progress) as stages:
        with importing(world.device):
            from specdec_cli.backends import native
            from specdec_cli.engine.plan import plan
            from specdec_cli.experiment.memory import document, measure_blocks

        native.check_kind(resolved)
        planned = plan(resolved, asked.permissions())
        if asked.output is not None and world.is_first:
            where = native.environment(native.prepared(planned))
            _opened(asked.output, resolved, where).close()
        profile = measure_blocks(planned, prompts, context, stages.begin, stages.expect)
        # Make the document before calling `world.ready()`: ranks that have called it wait for each
        # other only up to a timeout, and making the document takes a while, because rank 0 also
        # estimates the draft at other tensor-parallel degrees.
        found = document(resolved, profile) if world.is_first else {}
    world.ready()
    return found


def _estimated(
    asked: Asked,
    source: Prompts,
    lists: Mapping[str, Sequence[object]],
    rooms: Sequence[tuple[int, bool] | None],
    context: int | None,
) -> "tuple[specdec_cli.recipe.Recipe, dict[str, object]]":
    """Estimate the memory for every combination of the values in `lists` and the memory sizes.

    Returns the recipe and the results document of the first combination that fits. Under `points`
    the document has a row for every combination.

    lists: the values of each option that may have several, by parameter name.
    rooms: the memory sizes, as returned by `_rooms`. If there are several, each row of `points`
    has its own size in `device_memory_bytes`.

    Raises `SetupError` if no combination fits. If all combinations were skipped, raises the error
    of the first one. Raises an error at once if no other draft degree could avoid it: there is only
    one degree, or the same other values were refused with every degree.
    """
    from specdec_cli.commands.reading import recipe_options

    with importing():
        from specdec_cli.backends.native import check_kind
        from specdec_cli.experiment.memory import Estimator, document, point, settings

    where = recipe_options(source)
    rows: list[dict[str, object]] = []
    found: tuple[specdec_cli.recipe.Recipe, dict[str, object]] | None = None
    problem: SpecdecError | None = None
    refusals: Counter[tuple[object, ...]] = Counter()  # by memory size and values without draft_tp
    points, estimator = list(_points(lists, len(rooms))), Estimator(asked.permissions(), context)
    for room, values in itertools.product(rooms, points):
        memory = (
            {"device_memory_bytes": None if room is None else room[0]} if len(rooms) > 1 else {}
        )
        try:
            resolved = asked.resolve(where | values)
            check_kind(resolved)
            prompts = _prompts(source, resolved, asked, context)
            profile = estimator.estimate(resolved, prompts, room)
        except (SetupError, UsageError) as error:  # another draft TP may work
            others = (room, *(values[name] for name in values if name != "draft_tp"))
            refusals[others] += isinstance(error, UsageError)
            if len(lists["draft_tp"]) in (1, refusals[others]):
                raise
            own = {"k": values["num_speculative_tokens"], **values}
            del own["num_speculative_tokens"]
            given = {name: value for name, value in own.items() if value is not None}
            rows.append(given | memory | {"status": "skipped", "reason": error.message})
            problem = problem or error
            continue
        rows.append(point(resolved, profile) | memory)
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
    return found[0], {**found[1], "points": [settings(found[0]) | row for row in rows]}


def _rooms(device_memory: str | None, memory: str | None) -> Sequence[tuple[int, bool] | None]:
    """Parse the memory sizes for which to estimate.

    Returns a tuple for each size: its bytes, and whether it applies to GPUs only. If neither option
    was given, returns [None], which stands for this machine's memory.
    """
    if device_memory is not None and memory is not None:
        raise UsageError("--memory and --device-memory exclude each other", "leave one out")
    flag, text = ("--memory", memory) if memory is not None else ("--device-memory", device_memory)
    if text is None:
        return [None]
    try:
        sizes = [text] if memory is not None else text.split(",")
        return [(parse_bytes(one), memory is None) for one in dict.fromkeys(sizes)]
    except ValueError as problem:
        told, _, hint = str(problem).partition("; ")
        raise UsageError(f"{flag}: {told}", hint or None) from None


@contextmanager
def _naming_shapes() -> Iterator[None]:
    """Extend the error's hint if a model is missing: name bundled recipes that need no download.

    These recipes include the models' configs, and an estimate reads nothing else.
    """
    try:
        yield
    except SetupError as problem:
        if "hf download" in (problem.hint or ""):
            from specdec_cli.recipe import bundled_recipes

            names = ", ".join(r.name for r in bundled_recipes() if r.name.startswith("bench-"))
            problem.hint = f"{problem.hint}; bundled recipes that need no download: {names}"
        raise


def _opened(
    output: Path, resolved: "specdec_cli.recipe.Recipe", where: dict[str, object]
) -> "specdec_cli.experiment.folders.run_folder.RunFolder":
    """Create the run folder, and remove the results of an earlier profile, which would contradict
    the new recipe if this profile fails."""
    from specdec_cli.experiment.folders.run_folder import RunFolder

    folder = RunFolder.create(output, resolved, where)
    if (output / _SUMMARY).exists():  # without it, a picture there is the user's
        for name in (_SUMMARY, _PICTURE):
            folder.forget(name)
    return folder


def _show(document: dict[str, object], resolved: "specdec_cli.recipe.Recipe", asked: Asked) -> None:
    from specdec_cli.experiment.folders.record_lines import to_json
    from specdec_cli.terminal.memory import print_profile

    output, quiet = asked.output, asked.quiet
    if output is not None:
        from specdec_cli.report.memory import write_memory_picture

        where = document["environment"]
        assert isinstance(where, dict)
        folder = _opened(output, resolved, where)
        folder.write(_SUMMARY, to_json(document) + "\n")
        folder.close()
        try:
            write_memory_picture(document, output / _PICTURE)
        except ImportError:
            warn(["no memory.png without the package matplotlib"])
    show(document, print_profile, as_json=asked.as_json)
    if output is not None and not quiet and not asked.as_json:
        say(f"written to {output}")


def _prompts(
    source: Prompts,
    resolved: "specdec_cli.recipe.Recipe",
    asked: Asked,
    context: int | None,
) -> "list[specdec_cli.prompts.Prompt]":
    """Read the prompts if an option names them, or if only the recipe's prompts can determine the
    sequence length; otherwise return an empty list."""
    from specdec_cli.commands.reading import find_prompts

    is_given = bool(source.prompt) or source.prompt_file is not None or source.dataset is not None
    is_known = context is not None or resolved.cache.max_model_len is not None
    has_data = resolved.data is not None and resolved.data.path is not None
    if not is_given and (is_known or not has_data):
        return []
    return find_prompts(source, resolved, asked).prompts


def _points(lists: Mapping[str, Sequence[object]], devices: int = 1) -> Iterator[dict[str, object]]:
    """Yield all combinations of the values in `lists`, by parameter name.

    devices: the number of memory sizes for which each combination will be estimated. Raises
    `UsageError` if this makes too many estimates.
    """
    count = math.prod(map(len, lists.values())) * devices
    if count > _MOST_POINTS:
        raise UsageError(f"the lists make {count} combinations, but the limit is {_MOST_POINTS}")
    for chosen in itertools.product(*lists.values()):
        yield dict(zip(lists, chosen, strict=True))


def listed(text: str | None, flag: str, convert: Callable[[str], T]) -> Sequence[T | None]:
    """Parse `1,2,4` into distinct numbers; [None] if the option was not given."""
    if text is None:
        return [None]
    try:
        return list(dict.fromkeys(convert(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"{flag}: expected numbers such as 1,2,4, got {text!r}") from None
