"""Reads the prompts that a command line names, and makes the recipe's `data` section for them.

Imports pydantic, so commands import it inside functions.
"""

import os
import select
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from specdec_cli.commands import options
from specdec_cli.commands.options import Asked
from specdec_cli.commands.unused import warn_of_rows, warn_of_system
from specdec_cli.demo import PREFIX
from specdec_cli.errors import Notice, SpecdecError, UsageError
from specdec_cli.prompts import (
    DATE_KEY,
    Prompt,
    as_conversations,
    jsonl_of,
    load_prompts,
    parse_dataset,
    read_prompts,
    unused_keys,
    unused_template,
)
from specdec_cli.prompts.choose import STRATIFIED, sampled
from specdec_cli.prompts.types import PromptSet
from specdec_cli.recipe import PROMPTS, DataSection, Recipe, load_recipe
from specdec_cli.recipe.sections import ABOUT_ROWS
from specdec_cli.text import is_unicode, say

_SAMPLES = ("random", "stratified")
_OF_CHAT = ("template", "chat_template")  # options that have no effect without a chat template
_TEMPLATE_CHARACTERS = 1 << 20
_PATIENCE_S = 1.0  # seconds to wait for a socket's first bytes


def recipe_options(source: options.Prompts) -> dict[str, object]:
    """Return the values of the options that set recipe keys, keyed by the names in `OPTION_KEYS`.

    Raises `UsageError` for options that exclude each other.
    """
    if source.sample is not None and source.sample not in _SAMPLES:
        raise UsageError(f"--sample: expected {' or '.join(_SAMPLES)}, got {source.sample!r}")
    if source.dataset is None:
        file = source.prompt_file or ""
        is_alone = not source.prompt and file.strip() not in ("", "-")
        can_be_named = is_alone and is_unicode(file) and "\0" not in file
        return {"prompt_file": file if can_be_named else None}
    if source.prompt or source.prompt_file is not None:
        other = "--prompt" if source.prompt else "--prompt-file"
        raise UsageError(f"--dataset and {other} exclude each other", "leave one of them out")
    path, split, column = parse_dataset(source.dataset)
    return {"dataset": path, "dataset_split": split, "dataset_column": column}


def find_prompts(
    source: options.Prompts,
    resolved: Recipe,
    asked: Asked,
    *,
    reads_pipe: bool = False,
) -> PromptSet:
    """Read the prompts from the options, else from a pipe if `reads_pipe` is set, else from the
    recipe's data.

    `resolved` already contains the values of `recipe_options`. Some prompts, such as those from
    --prompt or standard input, are not in a file that a recipe could name. If there is a run
    folder, the result then contains a copy of the prompts to store in the folder, and its data
    section names that copy.
    """
    if source.chat is False:
        warn_of_system(asked, resolved.data)
    return _find(source, resolved, asked, reads_pipe=reads_pipe)


def _find(
    source: options.Prompts, resolved: Recipe, asked: Asked, *, reads_pipe: bool = False
) -> PromptSet:
    """Do what `find_prompts` says, without a warning about the system message."""
    chat, system = _chat_of(source, resolved.data)
    data, skip = resolved.data, source.skip_bad
    of_chat, template = _template_of(source, resolved.data, asked.output)
    prompts = None
    if not any(value is not None for value in recipe_options(source).values()):
        prompts = _loose(source, resolved, asked, reads_pipe=reads_pipe)
    if prompts is None:
        if data is None or data.path is None:
            told = "pass --prompt, --prompt-file or --dataset, or give the recipe a data.path"
            raise UsageError("no prompts", f"{told}; generate also reads a pipe")
        data, loaded = _from_data(source, resolved, data, asked)
        prompts = as_conversations(loaded.prompts, chat, system, template, skip_bad=skip)
        data = data.model_copy(update={"chat": chat, "system": system, **of_chat})
        notices = [*loaded.notices, *_unused(prompts, chat, of_chat)]
        return PromptSet(prompts, data, chat, notices, skip_bad=source.skip_bad)
    prompts = as_conversations(prompts, chat, system, template, skip_bad=skip)
    data, own = None, None
    if asked.output is not None:
        path = os.path.abspath(asked.output / PROMPTS)
        data, own = DataSection.model_validate({"path": path, "chat": chat}), jsonl_of(prompts)
    warn_of_rows(asked)
    return PromptSet(prompts, data, chat, _unused(prompts, chat, of_chat), own, source.skip_bad)


def _unused(prompts: Sequence[Prompt], chat: str, of_chat: Mapping[str, object]) -> list[Notice]:
    return [*unused_keys(prompts), *unused_template(prompts, chat, of_chat)]


def fewer_prompts(
    found: PromptSet, count: int, source: options.Prompts, resolved: Recipe, asked: Asked
) -> PromptSet:
    """Return `count` of the prompts that `find_prompts` has returned for the same options.

    They are drawn as --sample, --set or the recipe says. If none of them does, a stratified sample
    is drawn if there are categories; otherwise the first prompts are taken.
    """
    has_kinds = any(prompt.category is not None for prompt in found.prompts)
    how = source.sample or (STRATIFIED if has_kinds else None)
    if found.data is not None and found.own is None:
        # Read the file or dataset again, so that the data section names the same prompts.
        if found.data.sample is not None or "data.sample" in options.parse_sets(asked.sets or ()):
            how = source.sample
        return _find(replace(source, limit=count, sample=how), resolved, asked)
    # Standard input cannot be read again.
    few = found.prompts[:count]
    if how is not None:
        few = sampled(found.prompts, count, how, resolved.run.seed)
    few = [replace(prompt, index=index) for index, prompt in enumerate(few)]
    own = None if found.own is None else jsonl_of(few)
    of_chat, _ = _template_of(source, resolved.data, asked.output)
    return replace(found, prompts=few, notices=_unused(few, found.chat, of_chat), own=own)


def _loose(
    source: options.Prompts, resolved: Recipe, asked: Asked, *, reads_pipe: bool
) -> list[Prompt] | None:
    """Read the prompts that are not in a file that a recipe could name, such as those from --prompt
    or standard input. Returns None if none are given, or if the only source is an empty pipe."""
    given, file = source.prompt or [], source.prompt_file
    is_given = bool(given) or file is not None
    if not is_given and not (reads_pipe and _is_piped()):
        return None
    stdin = sys.stdin if file == "-" or not is_given else None
    found = read_prompts(
        given,
        file,
        stdin,
        limit=source.limit,
        sample=source.sample,
        seed=resolved.run.seed,
        skip_bad=source.skip_bad,
    )
    if not is_given and not found and asked.is_heard and resolved.data is not None:
        told = (
            "warning: the pipe is empty, so the recipe's prompts run (silence this with </dev/null)"
        )
        say(told)
    return found if is_given or found else None


def _from_data(
    source: options.Prompts, resolved: Recipe, data: DataSection, asked: Asked
) -> tuple[DataSection, PromptSet]:
    """Apply the options to the data section, with absolute paths, and read its prompts."""
    sets = options.parse_sets(asked.sets or ())
    own = {name for name, value in recipe_options(source).items() if value is not None}
    if own:
        # The prompts come from the command line. Reset the recipe's settings for its own prompts,
        # such as the column to read, unless options set them.
        given = {options.OPTION_KEYS[name][1] for name in own} | sets.keys()
        stale = [key for key in ABOUT_ROWS if not {"data", f"data.{key}"} & given]
        data = data.model_copy(update={k: DataSection.model_fields[k].default for k in stale})
    changes = {"limit": source.limit, "sample": source.sample}
    data = data.model_copy(update={k: v for k, v in changes.items() if v is not None})
    loaded = load_prompts(
        data,
        skip_bad=source.skip_bad,
        is_file="prompt_file" in own,
        seed=resolved.run.seed,
    )
    if own and os.path.exists(path := data.path or ""):
        data = data.model_copy(update={"path": os.path.abspath(path)})
    # Bundled recipes use few of the bundled prompts on purpose, to run in seconds. Drop the warning
    # that these do not represent the rest.
    is_chosen = source.limit is not None or {"data", "data.limit"} & sets.keys()
    if str(data.path).startswith(PREFIX) and not is_chosen:
        loaded = replace(loaded, notices=())
    return data, loaded


def _chat_of(source: options.Prompts, data: DataSection | None) -> tuple[str, str | None]:
    """Return the values of `data.chat` and `data.system` after applying the options. They are used
    for prompts from any source. Raises `UsageError` for options that exclude each other."""
    chat, system = source.chat, source.system
    chosen = [f"--{name.replace('_', '-')}" for name in _OF_CHAT if getattr(source, name)]
    if chat is False:
        if system is not None:
            raise UsageError("--no-chat and --system: a system message needs the chat template")
        if chosen:
            raise UsageError(f"--no-chat and {chosen[0]} exclude each other", "leave one out")
        return "off", None
    if system is None and data is not None:
        system = data.system
    if chat or chosen or system is not None:
        return "on", system
    return (data.chat if data is not None else "auto"), None


def _template_of(
    source: options.Prompts, data: DataSection | None, output: Path | None
) -> tuple[dict[str, object], dict[str, object]]:
    """Apply the options to the chat template's settings.

    Returns the keys of `data` that describe the chat template, and the inputs for rendering it: its
    switches, the replacement template if one is named, and the date to insert.

    Raises `UsageError` if `data.date` differs from the date of the run in the output folder.
    """
    switches: dict[str, Any] = dict(data.template) if data is not None else {}
    switches |= options.parse_sets(source.template or (), "--template")
    named = source.chat_template or (data.chat_template if data is not None else None)
    kept, date = _kept_date(output), data.date if data is not None else None
    if kept is not None and date not in (None, kept):
        told = f"{output} holds a run whose prompts have the date {kept}, and data.date is {date}"
        raise UsageError(told, "leave data.date out, or name another folder with -o")
    found: dict[str, object] = {"template": switches, "chat_template": named}
    if named is not None and os.path.isfile(named):
        found["chat_template"] = os.path.abspath(named)
        switches = {**switches, "chat_template": _template_file(named)}
    elif named is not None:
        switches = {**switches, "chat_template": named}
    moment = kept or date or datetime.now().isoformat(timespec="seconds")
    return found, {**switches, DATE_KEY: moment}


def _template_file(path: str) -> str:
    """Read a chat template from a file."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_TEMPLATE_CHARACTERS + 1)
    except (OSError, ValueError) as problem:
        raise UsageError(f"{path}: cannot be read as a chat template: {problem}") from None
    if "\0" in text or len(text) > _TEMPLATE_CHARACTERS:
        raise UsageError(f"{path}: is not a chat template", "a chat template is a Jinja file")
    return text


def _kept_date(output: Path | None) -> str | None:
    """Return the date that an earlier run in the output folder inserted into its prompts; None if
    there is no such run."""
    with suppress(SpecdecError, OSError):  # errors are reported later, when the folder is opened
        if output is not None and (output / "recipe.yaml").is_file():
            kept = load_recipe(str(output / "recipe.yaml")).data
            return kept.date if kept is not None else None
    return None


def _is_piped() -> bool:
    """True if standard input is a pipe, a file or a socket with data, rather than closed, a
    terminal or /dev/null."""
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISSOCK(mode):
            # Some launchers connect standard input to a socket that stays silent, and reading that
            # would wait forever.
            return bool(select.select([descriptor], [], [], _PATIENCE_S)[0])
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
