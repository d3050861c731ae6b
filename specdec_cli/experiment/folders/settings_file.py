"""Stores the settings that a run's records depend on in settings.json, and decides whether a run
may resume in its folder."""

import json
import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from specdec_cli import text
from specdec_cli.core.figures import Record
from specdec_cli.errors import Notice, OtherSettings, SetupError, UsageError
from specdec_cli.experiment.disk import refuse_special_files
from specdec_cli.experiment.folders.conclusions import VERSION, refuse_other_version
from specdec_cli.experiment.folders.record_lines import elsewhere, json_of, to_json
from specdec_cli.experiment.folders.records import Sample
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.folders.samples import not_measured
from specdec_cli.experiment.folders.settings_difference import (
    DIGESTS,
    Difference,
    first_difference,
    key_in_words,
    settings_difference,
    value_in_words,
)
from specdec_cli.recipe import Recipe
from specdec_cli.recipe.choices.registry import is_given

SETTINGS = "settings.json"
_PLUGIN = "plugins.files."  # begins the keys of plugins' digests


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings that samples depend on, as stored in a run folder. A run can only be resumed
    with the same settings.

    kind: a phrase for messages that names the kind of run.
    mark: the name of a field that only settings of this kind have.
    recipe: the resolved recipe, without the keys that other fields cover and the sections that the
        run does not use.
    prompts: the number of prompts, and hashes of their tokens and categories.
    device: the device's name.
    dtype: the target's dtype.
    """

    kind: ClassVar[str]
    mark: ClassVar[str]
    recipe: dict[str, Any]
    prompts: dict[str, Any]
    device: str
    dtype: str

    @property
    def digest(self) -> str:
        return text.digest(asdict(self))

    @property
    def seed(self) -> int:
        return int(self.recipe["run"]["seed"])

    @property
    def repeats(self) -> int:
        return int(self.recipe["run"]["repeats"])

    @property
    def is_greedy(self) -> bool:
        return bool(self.recipe["sampling"]["temperature"] == 0.0)

    @property
    def has_given_acceptance(self) -> bool:
        return is_given(self.recipe["speculation"]["acceptance"])

    @property
    def keeps_greedy(self) -> bool:
        """True if decoding is greedy and writes the target's own text at every k."""
        of_plugins = self.recipe.get("plugins", {}).get("remark")
        return self.is_greedy and not self.has_given_acceptance and of_plugins is None

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as they are when read back from JSON: with lists instead of
        tuples."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    def in_document(self) -> dict[str, Any]:
        """Return the settings and their hash, for a JSON document."""
        return self.as_dict() | {"settings_hash": self.digest}

    def misfit_in(self, record: Record, **known: Collection[Any]) -> str | None:
        """Explain why a record cannot belong to a point of this run. Return None if it can.

        known: the values that each field of a record may have.
        """
        told = elsewhere(record, known)
        if told or not isinstance(record, Sample):
            return told
        return not_measured(record, self.prompts["count"], self.repeats)


def opened(
    path: Path,
    settings: RunSettings,
    recipe: Recipe,
    where: dict[str, Any],
    load: Callable[[RunFolder], bool],
    *,
    resume: bool,
    notices: Sequence[Notice],
    own_prompts: str | None,
) -> RunFolder:
    """Open a run's folder: a new one or, with `resume`, an existing one with the same settings.

    load: a function that reads an existing folder and returns whether anything is left to measure.
    notices: warnings to keep in a new folder.
    own_prompts: as for `RunFolder.create`.

    Raises `UsageError` if the folder's run has different settings or belongs to another command.
    """
    if not resume or not (path / SETTINGS).exists():
        folder = RunFolder.create(path, recipe, where, own_prompts)
        write_settings(folder, settings, notices)
        return folder
    refuse_special_files(path)
    theirs = read_settings_file(path).get("settings")
    if not isinstance(theirs, dict) or settings.mark not in theirs:
        raise UsageError(f"{path} contains no {settings.kind}", "name another with -o")
    check_same(path, settings.kind.partition(" ")[0], theirs, settings.as_dict())
    folder = RunFolder.reopen(path)
    try:
        is_open = load(folder)
    except BaseException:
        folder.close()
        raise
    if not (path / "recipe.yaml").exists():
        folder.write_recipe(recipe)
    if not (path / "environment.json").exists():
        folder.write("environment.json", to_json(earlier_environment(path, where)) + "\n")
    if is_open:
        keep_environment_warning(folder, settings, where)
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


def kept_settings(path: Path, kind: type[RunSettings]) -> dict[str, Any]:
    """Read the settings in a run's folder. Return an empty dict if the run is of another kind.

    Raises `SetupError` if the settings are damaged, and the errors of `read_settings_file`.
    """
    refuse_special_files(path)
    file = read_settings_file(path)
    kept = file.get("settings")
    found: dict[str, Any] = kept if isinstance(kept, dict) else {}
    if found and kind.mark not in found:
        return {}
    is_whole = {one.name for one in fields(kind)} == found.keys()
    with suppress(RecursionError):
        if is_whole and file.get("hash") == text.digest(found):
            return found
    told = f"{path / SETTINGS}: no settings of a {kind.kind.partition(' ')[0]}"
    raise SetupError(told, "the file was damaged or edited")


def read_warnings(path: Path) -> list[Notice]:
    """Read the warnings that the runs in a folder recorded."""
    found = read_settings_file(path).get("warnings")
    listed = found if isinstance(found, list) else []
    return [Notice.read(one) for one in listed if isinstance(one, dict)]


def read_settings_file(path: Path) -> dict[str, Any]:
    """Read settings.json. Raises `UsageError` if the file is missing or has a different format
    version, and `SetupError` if it cannot be read."""
    try:
        found = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if not path.exists():
            raise UsageError(f"{path}: no such folder", "check the path") from None
        raise UsageError(f"{path} is not a folder of a sweep: it has no {SETTINGS}") from None
    except (OSError, ValueError, RecursionError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise SetupError(f"cannot read {path / SETTINGS}: {why}") from None
    if not isinstance(found, dict):
        raise SetupError(f"{path / SETTINGS}: no settings", "the file was damaged or edited")
    refuse_other_version(path / SETTINGS, found)
    return found


def read_json(path: Path) -> Any:
    """Read a JSON file. Return None if it cannot be read or is not valid JSON."""
    try:
        return json_of(path.read_bytes())
    except OSError:
        return None


def check_same(path: Path, what: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise `OtherSettings` if a folder's settings, `theirs`, differ from this run's, `ours`."""

    def error(typed: Collection[str]) -> OtherSettings | None:
        if (found := settings_difference(theirs, ours, typed)) is None:
            return None
        was, is_now = (value_in_words(found.key, one) for one in (found.theirs, found.ours))
        told = f"{key_in_words(found.key)} is {was} there and {is_now} now"
        hint = "--resume -o DIR alone uses the folder's settings; name another folder for a new run"
        if found.key in DIGESTS:
            told = f"{found.key} differs: {DIGESTS[found.key]} differ from the folder's"
        are_chosen = any(one in ("recipe", "prompts") or one.startswith("data") for one in typed)
        if found.key.startswith("prompts.") and not are_chosen:
            hint = (
                "the data, the target's tokenizer or its chat template has changed since the run "
                "began: restore it, or name another folder"
            )
        if found.key.startswith(_PLUGIN):
            told = f"--plugin {found.key.removeprefix(_PLUGIN)} {_change_of_plugin(found)}"
            hint = "resume with the plugins that the run began with, or name another folder with -o"
        if found.same_name:
            told = f"{found.key}: different weights than in the folder ({to_json(found.theirs)})"
            hint = "its samples are of the earlier model of that name: name another folder with -o"
        elif found.same_model:
            names = [found.theirs] if isinstance(found.theirs, str) else found.theirs
            spelled = shlex.join(part for name in names for part in ("--draft", name))
            hint = f"it is the same model, but records use its name: pass {spelled}"
        others = ", ".join(map(key_in_words, found.others))
        others = f"; others: {others}" if others else ""
        told = f"{path} contains a {what} with different settings: {told}{others}"
        return OtherSettings(told, hint, lambda typed: error(typed) or UsageError(told, hint))

    if (problem := error(())) is not None:
        raise problem


def _change_of_plugin(found: Difference) -> str:
    if found.theirs is None:
        return "was not there when the run began"
    return "is missing" if found.ours is None else "has changed since the run began"


def keep_environment_warning(
    folder: RunFolder, settings: RunSettings, where: dict[str, Any]
) -> None:
    """Add a warning to the folder if its samples were measured in a different environment, for
    example with other package versions.

    The samples are kept, although their times may not be comparable. Later runs and merges repeat
    the warning.
    """
    earlier, now = read_json(folder.path / "environment.json"), json.loads(to_json(where))
    if earlier is None or (found := first_difference(earlier, now)) is None:
        return
    key, was, is_now = found
    told = (
        f"samples are from two environments ({key} was {to_json(was)} and is {to_json(is_now)}): "
        "tokens/s and times mix both, but ratios compare the same prompts. For times from one "
        "environment, measure again into another folder"
    )
    found_now = Notice("environment_changed", told, {"key": key, "was": was, "is": is_now})
    keep_warnings(folder, settings, [found_now])


def keep_warnings(folder: RunFolder, settings: RunSettings, found: Iterable[Notice]) -> None:
    """Add those warnings to settings.json that are not there yet."""
    said = read_warnings(folder.path)
    if new := unsaid(found, said):
        write_settings(folder, settings, [*said, *new])


def unsaid(found: Iterable[Notice], said: Iterable[Notice]) -> list[Notice]:
    """Return the warnings in `found` whose messages are not in `said`, without duplicates."""
    known = {one.message for one in said}
    return list({one.message: one for one in found if one.message not in known}.values())


def earlier_environment(path: Path, where: dict[str, Any]) -> dict[str, Any]:
    """Return the environment in which a folder's samples were measured.

    It is read from summary.json, or else from environment.json, which is written when the run
    starts. If neither can be read, the result is `where`.
    """
    summary = read_json(path / "summary.json")
    measured = summary.get("environment") if isinstance(summary, dict) else None
    found = measured, read_json(path / "environment.json"), where
    return next(one for one in found if isinstance(one, dict))
