"""Warns the user about settings that have no effect beside the recipe's choices."""

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import specdec_cli
from specdec_cli.commands.options import OPTION_KEYS, Asked, parse_sets
from specdec_cli.text import say

_ENGINE = "engine.kind"
_OF_REQUESTS = ("served_model", "start_timeout_s", "request_timeout_s", "retries")
_READ_OF_RUNNING = [_ENGINE, *(f"engine.{name}" for name in _OF_REQUESTS)]  # with --server
# Keys that servers are not told, and further keys that a server has if specdec starts it.
_UNSENT = (
    *(f"cache.{one}" for one in ("block_size", "num_blocks", "cpu_bytes")),
    "cache.gpu_memory_utilization",
    *(f"run.{one}" for one in ("device", "compile", "cuda_graphs", "prefill_chunk")),
    OPTION_KEYS["draft_tp"][1],
)
_SENT_AT_START = ("cache.dtype", "target.tensor_parallel_size", "target.dtype", "draft.dtype")

Unused = tuple[Sequence[str], str]  # settings, and where or why they have no effect


def warn_of_unused(
    asked: Asked,
    recipes: "Sequence[specdec_cli.recipe.Recipe]",
    *,
    has_draft: bool,
    unread: Sequence[str] = (),
    asks: bool = False,
    starts: bool = False,
) -> None:
    """Warn the user about options and keys that have no effect beside the recipe's choices.

    recipes: the resolved recipes, one for each draft.
    has_draft: whether --draft is given.
    unread: keys of recipes that the command does not read.
    asks: whether a server decodes that is running already.
    starts: whether the command starts the servers that decode. If so, it passes them the settings
        of the recipe's target, so --target-tp and --dtype do have an effect.
    """
    _warn(asked, _of_method(asked, recipes, has_draft))
    _warn(asked, _of_choices(asked, recipes))
    found = [key for key in _keys_set(asked) if key in unread]
    _warn(asked, [(found, " in this command")])
    _warn(asked, _of_engine(asked, recipes[0], asks, starts))


def warn_of_rows(asked: Asked) -> None:
    """Warn the user about keys of --set that choose rows of a file. Call this if the prompts are
    from --prompt or standard input."""
    from specdec_cli.recipe.sections import ABOUT_ROWS

    about_rows = {f"data.{key}" for key in (*ABOUT_ROWS, "path")}
    found = [k for k, value in _keys_set(asked).items() if value is not None and k in about_rows]
    _warn(asked, [(found, " on prompts of --prompt or a pipe")])


def warn_of_system(asked: Asked, data: "specdec_cli.recipe.DataSection | None") -> None:
    """Warn the user that --no-chat drops the system message of --set or of the recipe."""
    _warn(asked, [(["data.system"], " with --no-chat")] if data and data.system is not None else [])


def warn_of_pairs(asked: Asked, num_drafts: int) -> None:
    """Warn the user that --pairs, which compares drafts, has nothing to compare."""
    _warn(asked, [(["--pairs"], " with a single draft")] if num_drafts == 1 else [])


def _keys_set(asked: Asked) -> dict[str, object]:
    """Return the keys that --set gives, with their values. A section that is given at once counts
    as its keys, whose values a key of its own replaces."""
    found = dict[str, object]()
    for key, value in sorted(
        parse_sets(asked.sets or ()).items(), key=lambda one: one[0].count(".")
    ):
        found |= _leaves(key, value)
    return found


def _leaves(key: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        return {key: value}
    found = dict[str, object]()
    for name, inner in value.items():
        found |= _leaves(f"{key}.{name}", inner)
    return found


def _warn(asked: Asked, unused: Iterable[Unused]) -> None:
    for names, why in unused:
        if names and asked.is_heard:
            have = "has" if len(names) == 1 else "have"
            say(f"warning: {', '.join(names)} {have} no effect{why}")


def _of_method(
    asked: Asked, recipes: "Sequence[specdec_cli.recipe.Recipe]", has_draft: bool
) -> Iterator[Unused]:
    """Yield the options and keys of --set about drafts that the recipes' methods do not read."""
    from specdec_cli.recipe.choices.registry import NONE, weights_from

    resolved = recipes[0]
    method, k = resolved.speculation.method, asked.given.get("num_speculative_tokens")
    of_k = f"-k {k}"
    if k is None:
        of_k = OPTION_KEYS["num_speculative_tokens"][1]
        k = _keys_set(asked).get(of_k)
    is_method = f": speculation.method is {method}"
    if has_draft and resolved.draft is not None and weights_from(method) != "draft":
        yield ["--draft"], is_method
    elif k and method == NONE:
        yield [of_k], is_method if resolved.draft else ": the recipe has no draft"
    name, key = OPTION_KEYS["draft_tp"]
    degree = asked.given.get("draft_tp")
    if degree is None:
        name, degree = key, _keys_set(asked).get(key)
    used = {"target": resolved.target.tensor_parallel_size, "draft": degree}
    all_used = [used.get(weights_from(one.speculation.method)) for one in recipes]
    if degree is not None and degree not in all_used:
        yield [name], is_method
    if not any(weights_from(one.speculation.method) == "draft" for one in recipes):
        keys = [one for one, value in _keys_set(asked).items() if value is not None]
        # A draft's name may have chosen the method. Then there is no section `draft`.
        names = {key, *(["draft.model"] if resolved.draft is None else [])}
        yield [one for one in keys if one.startswith("draft.") and one not in names], is_method


def _of_choices(asked: Asked, recipes: "Sequence[specdec_cli.recipe.Recipe]") -> Iterator[Unused]:
    """Yield the keys of `sampling` and `speculation` that none of the recipes reads, although the
    user sets them, by option, by --set or in the recipe's file."""
    from specdec_cli.recipe.choices.registry import CHOICES, METHODS, chooser_of

    keys = [key for key, value in _keys_set(asked).items() if value is not None]
    for one in recipes:
        keys += _not_default("speculation", one.speculation)
        keys += _not_default("speculation.length", one.speculation.length)
    for key in dict.fromkeys(keys):
        own = key.rpartition(".")[2]
        chooser = chooser_of(own) if key.startswith("speculation.") else None
        if chooser is None or key.startswith("speculation.options."):
            continue
        chosen = dict.fromkeys(attrgetter(chooser)(one.speculation) for one in recipes)
        choices = [CHOICES[chooser][name] for name in chosen]
        if not any(choice.code or own in choice.keys.model_fields for choice in choices):
            yield [key], f": speculation.{chooser} is {' or '.join(chosen)}"
    is_by_draws = recipes[0].speculation.length.policy == "confidence"
    if is_by_draws and not any(METHODS[one.speculation.method].draws for one in recipes):
        yield ["speculation.length.policy"], f": {recipes[0].speculation.method} draws no tokens"
    sampling = recipes[0].sampling
    if sampling.temperature == 0 and sampling.source == "recipe":
        for key in _not_default("sampling", sampling):
            if key in ("sampling.top_k", "sampling.top_p"):
                yield [key], ": sampling.temperature is 0"


def _of_engine(
    asked: Asked, recipe: "specdec_cli.recipe.Recipe", asks: bool, starts: bool
) -> Iterator[Unused]:
    """Yield the options and keys of --set that have no effect on servers, if they decode, and the
    keys of `engine` that are not read. asks, starts: see `warn_of_unused`."""
    unsent = ["draft_tp", "device", "num_blocks", "block_size"] if asks or starts else []
    unsent += ["target_tp", "dtype"] if asks else []
    given = [OPTION_KEYS[name] for name in unsent if asked.given.get(name) is not None]
    unread = {*(_UNSENT if asks or starts else ()), *(_SENT_AT_START if asks else ())}
    unread -= {key for _, key in given}
    sets = [key for key in _keys_set(asked) if key in unread]
    yield [*(option for option, _ in given), *sets], " on a server"
    of_engine = [] if starts else _not_default("engine", recipe.engine)
    keys = [key for key in of_engine if key not in (_READ_OF_RUNNING if asks else [_ENGINE])]
    yield keys, " on a server that is running" if asks else " without a server"


def _not_default(prefix: str, section: Any) -> list[str]:
    """Return the keys of a recipe's section whose values are not the defaults."""
    fields = type(section).model_fields.items()
    return [f"{prefix}.{name}" for name, info in fields if getattr(section, name) != info.default]
