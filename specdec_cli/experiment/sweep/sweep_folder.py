"""The run folder of a sweep: begun, gone on with, and read again."""

import json
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from specdec_cli.errors import SetupError, UsageError
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.points import Failure
from specdec_cli.experiment.records import Point
from specdec_cli.experiment.results import environment, to_json
from specdec_cli.experiment.run_folder import RunFolder, found_from_anywhere
from specdec_cli.experiment.settings_diff import first_difference, settings_difference
from specdec_cli.experiment.sweep.document import prompts_that_failed, sweep_document
from specdec_cli.experiment.sweep.sweep_plan import SweepPlan, warnings_of
from specdec_cli.experiment.sweep.sweep_records import SweepClock, SweepRecords
from specdec_cli.experiment.sweep.sweep_settings import SweepSettings
from specdec_cli.recipe import dump_recipe

_SETTINGS = "settings.json"


def open_folder(path: Path, plan: SweepPlan, records: SweepRecords, *, resume: bool) -> RunFolder:
    """The sweep's run folder, new or gone on with; `records` takes over what it holds.

    Raises `UsageError` when it holds a sweep with other settings, or another run.
    """
    where = _where(plan)
    if resume and (path / _SETTINGS).exists():
        check_same(path, "sweep", read_settings(path).as_dict(), plan.settings.as_dict())
        folder = reopened(path, lambda kept: records.load(kept.path, plan.settings))
        records.earlier_clock = _earlier_clock(path)
        records.earlier_where = earlier_environment(path, where)
        if not (path / "recipe.yaml").exists():
            folder.write("recipe.yaml", dump_recipe(found_from_anywhere(plan.recipe)))
        is_open = sum(map(len, records.samples.values())) < plan.num_samples
        if is_open:
            keep_environment_warning(folder, plan.settings, where)
        if not (path / "environment.json").exists():
            folder.write("environment.json", to_json(records.earlier_where) + "\n")
    else:
        folder = RunFolder.create(path, plan.recipe, where)
        write_settings(folder, plan.settings, warnings_of(plan))
    records.folder = folder
    return folder


def reopened(path: Path, load: Callable[[RunFolder], None]) -> RunFolder:
    """A folder to go on with, once `load` has read it."""
    folder = RunFolder.reopen(path)
    try:
        load(folder)
    except BaseException:
        folder.close()
        raise
    return folder


class Settings(Protocol):
    """What a folder's records depend on."""

    @property
    def digest(self) -> str: ...

    def as_dict(self) -> dict[str, Any]: ...


def write_settings(folder: RunFolder, settings: Settings, warnings: Sequence[str]) -> None:
    """What `read_settings` and `read_warnings` read."""
    found = {"hash": settings.digest, "settings": settings.as_dict(), "warnings": list(warnings)}
    folder.write(_SETTINGS, to_json(found) + "\n")


def read_warnings(path: Path) -> list[str]:
    """The warnings that a sweep's folder was begun and gone on with."""
    found = read_settings_file(path).get("warnings")
    return [str(one) for one in found] if isinstance(found, list) else []


def read_settings(path: Path) -> SweepSettings:
    """The settings of a sweep's folder. Raises `UsageError` when it is none, and `SetupError` when
    they are damaged."""
    file = read_settings_file(path)
    found = file.get("settings")
    if isinstance(found, dict) and "ks" not in found:
        raise UsageError(f"{path} is no folder of a sweep: its {_SETTINGS} is another command's")
    try:
        settings = SweepSettings.of_dict(found if isinstance(found, dict) else {})
        settings.check()
        if file.get("hash") != settings.digest:
            raise ValueError("not the settings that were written")
    except (KeyError, TypeError, ValueError):
        raise SetupError(
            f"{path / _SETTINGS}: no settings of a sweep", "the file was damaged or edited"
        ) from None
    return settings


def read_settings_file(path: Path) -> dict[str, Any]:
    """settings.json of a folder. Raises `UsageError` where there is none."""
    try:
        found = json.loads((path / _SETTINGS).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path} is no folder of a sweep: it has no {_SETTINGS}") from None
    except (OSError, ValueError, RecursionError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise SetupError(f"cannot read {path / _SETTINGS}: {why}") from None
    if not isinstance(found, dict):
        raise SetupError(f"{path / _SETTINGS}: no settings", "the file was damaged or edited")
    return found


def check_same(path: Path, what: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raises `UsageError` where the settings that a folder was begun with are not ours."""
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
        spelled = " ".join(f"--draft {name}" for name in names)
        hint = f"it is the same model, but records go by its name: pass {spelled}"
    raise UsageError(f"{path} holds a {what} with other settings: {told}", hint)


def another_environment(path: Path, where: dict[str, Any]) -> str | None:
    """A warning for a folder that was begun elsewhere, such as with other versions.

    Its samples are kept; their times may differ for that reason.
    """
    try:
        earlier = json.loads((path / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if (found := first_difference(earlier, json.loads(to_json(where)))) is None:
        return None
    key, there, now = found
    return f"samples are of two environments: {key} was {to_json(there)} and is {to_json(now)}"


def keep_environment_warning(folder: RunFolder, settings: Settings, where: dict[str, Any]) -> None:
    """Add it to the folder's warnings, so that whoever goes on with it or merges it says so too."""
    found, said = another_environment(folder.path, where), read_warnings(folder.path)
    if found is not None and found not in said:
        write_settings(folder, settings, [*said, found])


def earlier_environment(path: Path, where: dict[str, Any]) -> dict[str, Any]:
    """What a folder's summary says of where its samples were measured, else of where it was begun;
    else `where`."""
    for name, key in (("summary.json", "environment"), ("environment.json", None)):
        try:
            found = json.loads((path / name).read_text(encoding="utf-8"))
            found = found if key is None else found[key]
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            continue
        if isinstance(found, dict):
            return found
    return where


def finish(
    plan: SweepPlan,
    records: SweepRecords,
    points: Sequence[Point],
    warnings: Sequence[str],
    clock: SweepClock,
    folder: RunFolder | None,
    failures: Collection[Failure],
) -> dict[str, Any]:
    """The sweep's document, also written as the folder's summary.

    Its warnings are `warnings` and what has shown itself since. failures: of this run.
    """
    warnings = [*warnings, *prompts_that_failed(records.samples.values())]
    where = _where(plan)
    if records.earlier_where is not None and not clock.rounds:  # nothing was measured now
        clock, where = records.earlier_clock, records.earlier_where
    recipe = plan.recipe.model_dump(mode="json")
    document = sweep_document(
        plan.settings, recipe, where, records, points, warnings, clock, failures
    )
    if folder is not None:
        folder.write("summary.json", to_json(document) + "\n")
    return document


def _earlier_clock(path: Path) -> SweepClock:
    """Of who measured a sweep that is complete; zeros where no summary says so."""
    try:
        found = json.loads((path / "summary.json").read_text(encoding="utf-8"))["measuring"]
        times = [float(found[name]) for name in ("rounds", "measuring", "processor")]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return SweepClock()
    return SweepClock(*times) if all(map(math.isfinite, times)) else SweepClock()


def _where(plan: SweepPlan) -> dict[str, Any]:
    job: Job = plan.jobs[0]
    found = environment(job.plan.device, job.plan.target.dtype, job.plan.execution)
    return found | {
        "cache": "sized for the largest k and batch size, the same at every point, k = 0 included"
    }
