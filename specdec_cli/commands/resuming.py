"""Completes a --resume command line with the settings stored in the run folder. After an
interruption, shows the command that resumes the run."""

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

import specdec_cli.experiment.folders
from specdec_cli.commands.options import Asked, use_threads
from specdec_cli.errors import ExitCode, RunError, UsageError
from specdec_cli.launch.spinning import chosen_threads
from specdec_cli.text import counted, say


def resumed(
    asked: Asked, kind: "type[specdec_cli.experiment.folders.settings_file.RunSettings]"
) -> tuple[Asked, dict[str, Any]]:
    """Return the completed command line and the stored settings of the run to resume.

    The settings are {} if the folder has none yet. If the command line names no recipe, the
    folder's recipe is used. kind: the class of the command's settings.

    Raises `UsageError` for --resume without a folder. Also raises it for a new folder if no model
    is named, because a mistyped path would otherwise start the demo, and for a folder without its
    recipe.yaml if no model is named either.
    """
    if asked.output is None:
        noun = kind.kind.partition(" ")[0]
        raise UsageError(f"--resume needs the {noun}'s folder", "name it with -o DIR")
    from specdec_cli.experiment.folders.settings_file import SETTINGS, kept_settings

    folder, recipe = asked.output, asked.output / "recipe.yaml"
    is_new = not (folder / SETTINGS).exists()
    kept = {} if is_new else kept_settings(folder, kind)
    if kept and chosen_threads() is None:
        _use_threads_of(folder)
    if kept and asked.recipe is None and recipe.is_file():
        asked = replace(asked, recipe=str(recipe))
    names_models = (asked.recipe, asked.given.get("target"), asked.sets) != (None, None, None)
    if kept and not names_models:
        raise UsageError(
            f"--resume: {folder} has no recipe.yaml, so the run's models and settings are unknown",
            "restore the file, or give the recipe and options with which the run began",
        )
    if is_new and not names_models:
        raise UsageError(
            f"--resume: {folder} contains no {kind.kind}",
            "check the path; a new run needs a recipe or --target, for example the recipe demo",
        )
    return asked, kept


def _use_threads_of(folder: Path) -> None:
    """Use the run's original number of threads if the machine has the same number of processors.
    With a different number, times of the same run would not be comparable."""
    from specdec_cli.experiment.folders.settings_file import read_json

    where = read_json(folder / "environment.json")
    if isinstance(where, dict) and where.get("device") == "cpu":
        threads, cores = where.get("torch_threads"), os.cpu_count()
        if cores == where.get("cpu_count") and type(threads) is int and threads in range(1, 2**16):
            use_threads(threads)


def folder_of_servers(asked: Asked, kept: Mapping[str, Any]) -> Path | None:
    """Return the resumed run's folder if its samples come from servers that the user started;
    otherwise None."""
    is_theirs = kept and kept["device"].startswith("server") and "engine" not in kept["recipe"]
    return asked.output if is_theirs else None


def names_of_drafts(asked: Asked, kept: Mapping[str, Any]) -> list[str | None]:
    """Return the names of the drafts that the sweep must compare. If it resumes with the recipe in
    its folder, these are the stored names. Otherwise returns [None], for the recipe's own draft."""
    return list(kept["drafts"]) if kept and _has_its_recipe(asked) else [None]


def with_draft(asked: Asked, kept: Mapping[str, Any], name: str | None = None) -> Asked:
    """Return the command line of a resumed run, with the draft named as in the stored settings.

    This is needed because the folder's recipe contains the draft's whole path, while the resumed
    run must use the same name as before. Returns `asked` unchanged if nothing is stored, or if the
    command line uses a recipe that is not the folder's.

    name: the draft's name in a sweep that compares several drafts; None if there is only one.
    """
    if not kept or not _has_its_recipe(asked):
        return asked
    from specdec_cli.recipe.source import value_text

    recipe = kept["recipe"]
    names, sections = kept.get("drafts", [name]), recipe.get("drafts", [recipe.get("draft")])
    # --draft can also name a method that has no draft model; its section then has `method`.
    section = dict(zip(names, sections, strict=True)).get(name) or ({"model": name} if name else {})
    keys = {"speculation.method" if k == "method" else f"draft.{k}": v for k, v in section.items()}
    if "draft.weights" in keys:  # a fingerprint; the recipe's own value is in weights_as
        keys["draft.weights"] = keys.pop("draft.weights_as", "auto")
    found = [f"{key}={value_text(value)}" for key, value in keys.items()]
    return replace(asked, sets=[*found, *(asked.sets or ())])


def _has_its_recipe(asked: Asked) -> bool:
    folder, recipe = asked.output, asked.recipe
    return folder is not None and recipe is not None and Path(recipe) == folder / "recipe.yaml"


@contextmanager
def saying_what_is_kept(
    asked: Asked, command: str, noun: str, *, is_told: bool = True, **own: object
) -> Iterator[None]:
    """Report what the run's folder contains and how to resume the run, if the block is interrupted
    or its ranks fail.

    noun: what to call a line of samples.jsonl, in the singular.
    is_told: False to report nothing.
    own: see `say_kept`.
    """
    try:
        yield
    except typer.Exit:
        raise
    except (KeyboardInterrupt, SystemExit, RunError) as end:
        if isinstance(end, RunError) and end.code == ExitCode.USAGE:
            raise
        if isinstance(end, SystemExit) and end.code != ExitCode.SIGTERM:
            raise  # stdout was closed by its reader; the run itself is complete
        path = asked.output / "samples.jsonl" if asked.output is not None else None
        if is_told and asked.is_heard and path is not None and path.exists():
            kept = path.read_bytes().count(b"\n")
            say_kept(counted(kept, noun), asked, command, **own)
        raise


def say_kept(what: str, asked: Asked, command: str, **own: object) -> None:
    """Tell the user what the interrupted run's folder keeps, and the command that resumes the run.

    what: what the folder keeps, such as "3 samples".
    own: the values of options that the folder does not record, by parameter name.
    """
    given = {name: getattr(asked, name) for name in ("trust_remote_code", "allow_pickle")}
    given |= {"plugin": asked.plugin, **own}
    given |= {"json": asked.as_json, "quiet": asked.quiet, "verbose": asked.verbose}
    words = [command, "--resume", "-o", str(asked.output)]
    for name, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one is not False:
                words += [f"--{name.replace('_', '-')}", *([] if one is True else [str(one)])]
    say(f"{asked.output} keeps {what}")
    say(f"resume with: specdec {shlex.join(words)}")
