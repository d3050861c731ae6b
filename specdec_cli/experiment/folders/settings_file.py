"""settings.json of a run folder: the settings of its records, and whether a run may resume."""

import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_cli.errors import Notice, SetupError, UsageError
from specdec_cli.experiment.disk import refuse_special_files
from specdec_cli.experiment.folders.conclusions import VERSION, refuse_other_version
from specdec_cli.experiment.folders.records import json_of
from specdec_cli.experiment.folders.results import to_json
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.folders.run_settings import RunSettings
from specdec_cli.experiment.folders.settings_diff import first_difference, settings_difference
from specdec_cli.recipe import Recipe

SETTINGS = "settings.json"


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a run folder from its beginning on.

    what, command: the kind of run and its command, in words. mark: a key that only the settings of
    that kind have. notices: warnings of the run's plan. own_prompts: as for `RunFolder.create`.
    """

    what: str
    command: str
    mark: str
    recipe: Recipe
    settings: RunSettings
    where: dict[str, Any]
    notices: Sequence[Notice] = ()
    own_prompts: str | None = None


def opened(
    path: Path, contents: Contents, load: Callable[[RunFolder], bool], *, resume: bool
) -> RunFolder:
    """A run's folder: a new one or (resume) an earlier one of the same settings.

    load: reads an earlier one, and returns whether something is left to measure. Raises
    `UsageError` where it holds a run with other settings, or another command's.
    """
    settings, what = contents.settings, contents.what
    if not resume or not (path / SETTINGS).exists():
        folder = RunFolder.create(path, contents.recipe, contents.where, contents.own_prompts)
        write_settings(folder, settings, contents.notices)
        return folder
    refuse_special_files(path)
    theirs = read_settings_file(path).get("settings")
    if not isinstance(theirs, dict) or contents.mark not in theirs:
        raise UsageError(f"{path} holds no {what} of {contents.command}", "name another with -o")
    check_same(path, what, theirs, settings.as_dict())
    folder = RunFolder.reopen(path)
    try:
        is_open = load(folder)
    except BaseException:
        folder.close()
        raise
    if not (path / "recipe.yaml").exists():
        folder.write_recipe(contents.recipe)
    if is_open:
        keep_environment_warning(folder, settings, contents.where)
    return folder


def write_settings(folder: RunFolder, settings: RunSettings, warnings: Sequence[Notice]) -> None:
    """Write settings.json."""
    found = {
        "version": VERSION,
        "hash": settings.digest,
        "settings": settings.as_dict(),
        "warnings": list(warnings),
    }
    folder.write(SETTINGS, to_json(found) + "\n")


def read_warnings(path: Path) -> list[Notice]:
    """The warnings of the runs that wrote a folder."""
    found = read_settings_file(path).get("warnings")
    listed = found if isinstance(found, list) else []
    return [Notice.read(one) for one in listed if isinstance(one, dict)]


def read_settings_file(path: Path) -> dict[str, Any]:
    """The content of settings.json. Raises `UsageError` without the file, or for another version's
    folder."""
    try:
        found = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path} is no folder of a sweep: it has no {SETTINGS}") from None
    except (OSError, ValueError, RecursionError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise SetupError(f"cannot read {path / SETTINGS}: {why}") from None
    if not isinstance(found, dict):
        raise SetupError(f"{path / SETTINGS}: no settings", "the file was damaged or edited")
    refuse_other_version(path / SETTINGS, found)
    return found


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if it cannot be read."""
    try:
        return json_of(path.read_bytes())
    except OSError:
        return None


def check_same(path: Path, what: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise `UsageError` if a folder was begun with other settings than ours."""
    found = settings_difference(theirs, ours)
    if found is None:
        return
    told = f"{found.key} is {to_json(found.theirs)} there and {to_json(found.ours)} now"
    hint = "resume with the same options, or name another folder with -o"
    if found.same_name:
        told = f"{found.key}: other weights than there ({to_json(found.theirs)})"
        hint = "its samples are of the model that was there: name another folder with -o"
    elif found.same_model:
        names = [found.theirs] if isinstance(found.theirs, str) else found.theirs
        spelled = shlex.join(part for name in names for part in ("--draft", name))
        hint = f"it is the same model, but records go by its name: pass {spelled}"
    raise UsageError(f"{path} holds a {what} with other settings: {told}", hint)


def keep_environment_warning(
    folder: RunFolder, settings: RunSettings, where: dict[str, Any]
) -> None:
    """Add a warning to a folder that was begun in another environment, such as with other versions.

    Its samples are kept, but their times may differ. Later runs and merges repeat the warning.
    """
    earlier, now = read_json(folder.path / "environment.json"), json.loads(to_json(where))
    if earlier is None or (found := first_difference(earlier, now)) is None:
        return
    key, was, is_now = found
    told = f"samples are of two environments: {key} was {to_json(was)} and is {to_json(is_now)}"
    found_now = Notice("environment_changed", told, {"key": key, "was": was, "is": is_now})
    keep_warning(folder, settings, found_now)


def keep_warning(folder: RunFolder, settings: RunSettings, found: Notice) -> None:
    """Add a warning to settings.json, unless it says so already."""
    said = read_warnings(folder.path)
    if found.message not in [one.message for one in said]:
        write_settings(folder, settings, [*said, found])


def unsaid(found: Iterable[Notice], said: Iterable[Notice]) -> list[Notice]:
    """The warnings whose messages are not among those said, each once."""
    known = {one.message for one in said}
    return list({one.message: one for one in found if one.message not in known}.values())


def earlier_environment(path: Path, where: dict[str, Any]) -> dict[str, Any]:
    """The environment in a folder's summary, else the one it was begun in, else `where`."""
    summary = read_json(path / "summary.json")
    measured = summary.get("environment") if isinstance(summary, dict) else None
    found = measured, read_json(path / "environment.json"), where
    return next(one for one in found if isinstance(one, dict))
