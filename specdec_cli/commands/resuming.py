"""Completes a command line with --resume by the settings in the run folder, and shows the command
that resumes an interrupted run."""

import json
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
from specdec_cli.text import counted, inert


def resumed(
    asked: Asked, kind: "type[specdec_cli.experiment.folders.settings_file.RunSettings]"
) -> tuple[Asked, dict[str, Any]]:
    """Return the completed command line, and the settings of the run to resume; {} if the folder
    has none yet.

    A command line without a recipe gets the folder's recipe. kind: the class of the command's
    settings. Raises `UsageError` for --resume without a folder, and for a new folder if no model is
    named: a mistyped path would start the demo.
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
    if is_new and not names_models:
        raise UsageError(
            f"--resume: {folder} contains no {kind.kind}",
            "check the path; a new run needs a recipe or --target, for example the recipe demo",
        )
    return asked, kept


def _use_threads_of(folder: Path) -> None:
    """Use the run's original number of threads if the machine has the same number of processors. A
    different number would mix times from two environments."""
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
    """Return the names of the sweep's arms if the recipe is from the sweep's folder; otherwise
    [None]."""
    return list(kept["drafts"]) if kept and _has_its_recipe(asked) else [None]


def with_draft(asked: Asked, kept: Mapping[str, Any], name: str | None = None) -> Asked:
    """Replace the draft's path in the command line by the name in the folder's records, because the
    folder's recipe has the whole path. The draft of another recipe keeps its name. name: the name
    of an arm of a sweep."""
    if not kept or not _has_its_recipe(asked):
        return asked
    recipe = kept["recipe"]
    names, sections = kept.get("drafts", [name]), recipe.get("drafts", [recipe.get("draft")])
    # --draft also names methods without a draft model.
    section = dict(zip(names, sections, strict=True)).get(name) or ({"model": name} if name else {})
    keys = {"speculation.method" if k == "method" else f"draft.{k}": v for k, v in section.items()}
    if "draft.weights" in keys:  # records keep a fingerprint here
        keys["draft.weights"] = keys.pop("draft.weights_as", "auto")
    found = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    return replace(asked, sets=[*found, *(asked.sets or ())])


def _has_its_recipe(asked: Asked) -> bool:
    folder, recipe = asked.output, asked.recipe
    return folder is not None and recipe is not None and Path(recipe) == folder / "recipe.yaml"


@contextmanager
def saying_what_is_kept(
    asked: Asked, command: str, noun: str, *, is_told: bool = True, **own: object
) -> Iterator[None]:
    """Report what the folder keeps if the run is interrupted or its ranks fail.

    noun: the singular noun for a line of samples.jsonl. own: as for `say_kept`.
    """
    try:
        yield
    except typer.Exit:
        raise
    except (KeyboardInterrupt, SystemExit, RunError) as end:
        if isinstance(end, RunError) and end.code == ExitCode.USAGE:
            raise
        if isinstance(end, SystemExit) and end.code != ExitCode.SIGTERM:
            raise  # stdout's reader is gone: the run itself is complete
        path = asked.output / "samples.jsonl" if asked.output is not None else None
        if is_told and asked.is_heard and path is not None and path.exists():
            kept = path.read_bytes().count(b"\n")
            say_kept(counted(kept, noun), asked, command, **own)
        raise


def say_kept(what: str, asked: Asked, command: str, **own: object) -> None:
    """Tell the user how many samples the interrupted run's folder has, and the command that resumes
    the run. own: options that the folder does not record, by parameter name.
    """
    given = {name: getattr(asked, name) for name in ("trust_remote_code", "allow_pickle")}
    given |= {"plugin": asked.plugin, **own}
    given |= {"json": asked.as_json, "quiet": asked.quiet, "verbose": asked.verbose}
    words = [command, "--resume", "-o", str(asked.output)]
    for name, value in given.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one is not False:
                words += [f"--{name.replace('_', '-')}", *([] if one is True else [str(one)])]
    typer.echo(f"{asked.output} keeps {what}", err=True)
    typer.echo(inert(f"resume with: specdec {shlex.join(words)}"), err=True)
