"""Merges the shards of a sweep into one folder."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from specdec_cli.core.figures import Rate
from specdec_cli.errors import LOG, LOGGED, ExitCode, Notice, SetupError, UsageError
from specdec_cli.experiment.disk import or_setup_error
from specdec_cli.experiment.folders.record_lines import json_of, to_json
from specdec_cli.experiment.folders.records import CurvePart, Key, Point, Sample, Stretch
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.folders.settings_difference import (
    DIGESTS,
    key_in_words,
    settings_difference,
    value_in_words,
)
from specdec_cli.experiment.folders.settings_file import (
    read_json,
    read_warnings,
    unsaid,
    write_settings,
)
from specdec_cli.experiment.forecasts import ReplayText
from specdec_cli.experiment.points import Failure
from specdec_cli.experiment.preparing import few_prompts
from specdec_cli.experiment.sweep.document import (
    order_of,
    points_at,
    prompts_that_failed,
    sweep_document,
)
from specdec_cli.experiment.sweep.sweep_folder import read_settings
from specdec_cli.experiment.sweep.sweep_records import SweepRecords, SweepSettings, read_kept
from specdec_cli.recipe import PROMPTS, Recipe, load_recipe

_MAX_NAMED = 8
_INCOMPLETE = {"shards_missing", "points_lack_prompts"}  # codes of warnings

R = TypeVar("R", Sample, ReplayText, CurvePart, Point, Stretch)


def merge_folders(paths: Sequence[Path], output: Path) -> tuple[dict[str, Any], ExitCode]:
    """Merge the shards in `paths` and write the run folder of the whole sweep to `output`. Returns
    the sweep's document and the exit code.

    Raises `UsageError` if the folders belong to different sweeps, or if two of them contain samples
    of the same prompt. A missing or unfinished shard causes a warning that its prompts are missing,
    and the exit code `PARTIAL`.
    """
    shards = [read_settings(path) for path in paths]
    whole = replace(shards[0], shard=None)
    for path, settings in zip(paths[1:], shards[1:], strict=True):
        # The names of drafts are not compared, since one model may have two names. Their recipe
        # sections are compared instead.
        named = replace(settings, shard=None, drafts=whole.drafts)
        found = settings_difference(whole.as_dict(), named.as_dict())
        if found is not None:
            own, first = (value_in_words(found.key, one) for one in (found.ours, found.theirs))
            told = f"{key_in_words(found.key)} is {own} and {first}"
            if found.key in DIGESTS:
                told = f"{DIGESTS[found.key]} differ"
            elif found.same_name:
                told = f"{found.key}: the weights differ ({found.ours!r})"
            raise UsageError(f"{path} and {paths[0]} belong to different sweeps: {told}")
    records = SweepRecords()
    failures: dict[Key, Failure] = {}
    for number, path in enumerate(paths):
        _add(records, path, number, shards[number], whole)
        failures |= _failures(path, shards[number], whole)
    count = whole.prompts["count"]
    failures = {k: why for k, why in failures.items() if _lacks(k, whole, records)}
    recipe, own_prompts = _recipe_for(output, paths[0])
    where = _environments(paths)
    folder = RunFolder.create(output, recipe, where, own_prompts)
    said = unsaid((one for path in paths for one in (*read_warnings(path), *_logged(path))), [])
    write_settings(folder, whole, said)
    for key in sorted(records.samples, key=order_of(whole)):
        folder.append("samples.jsonl", *(s for _, s in sorted(records.samples[key].items())))
    texts = (sorted(records.texts[draft].items()) for draft in whole.drafts)
    folder.append("replay.jsonl", *(text for found in texts for _, text in found))
    folder.append("curve.jsonl", *(p for parts in records.costs.values() for p in parts.values()))
    folder.append("load.jsonl", *(s for of in records.stretches.values() for s in of.values()))
    points = [p for b, r in whole.levels for p in points_at(whole, records, b, failures, r)]
    folder.append("points.jsonl", *points)
    warnings = [
        *said,
        *_missing_shards(shards),
        *_several_dates(paths),
        *_missing(whole, records),
        *few_prompts(count),
        *prompts_that_failed(records.samples.values()),
        *LOGGED,
    ]
    document, code = sweep_document(whole, recipe, where, records, points, warnings)
    folder.write("summary.json", to_json(document) + "\n")
    folder.close()
    if code == ExitCode.OK and any(one.code in _INCOMPLETE for one in document["warnings"]):
        code = ExitCode.PARTIAL
    return document, code


def _recipe_for(output: Path, shard: Path) -> tuple[Recipe, str | None]:
    """Return the recipe of the whole sweep and the text of the prompts file that must be written to
    `output`.

    The text is None unless the shard's folder stores the prompts itself. If it does, the recipe
    names the file in `output`, so that the merged sweep does not depend on the shard's folder.
    """
    recipe = load_recipe(str(shard / "recipe.yaml"))
    data, own = recipe.data, shard / PROMPTS
    if data is None or data.path != os.path.abspath(own):
        return recipe, None
    with or_setup_error(f"cannot read {own}"):
        text = own.read_text(encoding="utf-8")
    return recipe.changed("data", path=os.path.abspath(output / PROMPTS)), text


def _logged(path: Path) -> list[Notice]:
    """Return the warnings that a finished shard logged, such as one about rows that it left out."""
    summary = read_json(path / "summary.json")
    listed = summary.get("warnings") if isinstance(summary, dict) else None
    found = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return [Notice.read(one) for one in found if one.get("code") == LOG]


def _missing_shards(shards: Sequence[SweepSettings]) -> list[Notice]:
    """Return a warning that lists the shards of the sweep that are missing from `shards`."""
    there = [settings.shard for settings in shards if settings.shard is not None]
    if not there or len(there) < len(shards) or len({count for _, count in there}) > 1:
        return []
    count = there[0][1]
    missing = sorted({*range(count)} - {place for place, _ in there})
    if not missing:
        return []
    names = [f"{place}/{count}" for place in missing]
    shown = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
    told = f"shards {shown} are missing: merge them too"
    if len(names) == 1:
        told = f"shard {shown} is missing: merge it too"
    return [Notice("shards_missing", told, {"missing": names, "num_shards": count})]


def _several_dates(paths: Sequence[Path]) -> list[Notice]:
    """Return a warning if the chat template wrote different dates into the prompts of these
    shards."""
    data = [load_recipe(str(path / "recipe.yaml")).data for path in paths]
    dates = sorted({one.date for one in data if one is not None and one.date is not None})
    if len(dates) < 2:
        return []
    told = (
        f"the chat template wrote {len(dates)} dates into the prompts: {', '.join(dates)}; "
        "data.date fixes one"
    )
    return [Notice("several_dates", told, {"dates": dates})]


def _read(path: Path, kind: type[R], settings: SweepSettings, whole: SweepSettings) -> list[R]:
    """Read a shard's records, and replace its draft names with those of the whole sweep."""
    names = {None: None, **dict(zip(settings.drafts, whole.drafts, strict=True))}
    found = read_kept(path, kind, settings)
    return [record.model_copy(update={"draft": names[record.draft]}) for record in found]


def _add(
    records: SweepRecords, path: Path, number: int, settings: SweepSettings, whole: SweepSettings
) -> None:
    """Add one shard's records, except points at request rates that were not measured completely.

    Requests, time windows and parts of the time curve are numbered from 0 in each shard, so they
    are renumbered here to follow those of earlier shards. All points of a rate or batch size are
    renumbered alike, even if an earlier shard lacks some of them, because the number of a request
    or part says which ones of other points it is compared with. Raises `UsageError` if an earlier
    shard has a sample of the same prompt at the same point.
    """
    # The shard is read alone first: if it repeats a record, such as that of a prompt that failed
    # and ran again, the last one counts.
    own = SweepRecords()
    for record in (
        *_read(path, Sample, settings, whole),
        *_read(path, ReplayText, settings, whole),
        *_read(path, CurvePart, settings, whole),
        *_read(path, Stretch, settings, whole),
    ):
        own.enter(record)
    own.drop_parts()
    next_request, next_part = _following(records.samples), _following(records.costs)
    for key, samples in own.samples.items():
        mine, there = records.samples[key], {s.index for s in records.samples[key].values()}
        if twice := sorted(there & {s.index for s in samples.values()}):
            told = f"{path} has prompt {twice[0]} at k = {key.k}, and so has a folder before it"
            raise UsageError(told, "merge each shard once")
        if key.request_rate is None:
            mine.update(samples)
            continue
        start = next_request[key.batch_size, key.request_rate]
        for request, sample in samples.items():
            mine[start + request] = sample.model_copy(update={"request": start + request})
        for stretch in own.stretches[key].values():
            part = len(records.stretches[key])
            records.stretches[key][part] = stretch.model_copy(update={"shard": part})
    for draft, texts in own.texts.items():
        records.texts[draft] = texts | records.texts[draft]
    for key, costs in own.costs.items():
        for part, cost in costs.items():
            place = next_part[key.batch_size, key.request_rate] + part
            records.costs[key][place] = cost.model_copy(update={"part": place, "shard": number})


def _following(
    found: Mapping[Key, Iterable[int]],
) -> defaultdict[tuple[int, Rate | None], int]:
    """Return the number after the largest one that points at a batch size and rate use, by batch
    size and rate; 0 where there are none. found: the numbers that each point uses."""
    following: defaultdict[tuple[int, Rate | None], int] = defaultdict(int)
    for key, numbers in found.items():
        level = key.batch_size, key.request_rate
        following[level] = max([following[level], *(number + 1 for number in numbers)])
    return following


def _lacks(key: Key, whole: SweepSettings, records: SweepRecords) -> bool:
    """Return True if some of the sweep's prompts were not measured at a point."""
    found = {sample.index for sample in records.samples[key].values()}
    return len(found) < int(whole.prompts["count"])


def _failures(path: Path, settings: SweepSettings, whole: SweepSettings) -> dict[Key, Failure]:
    """Return the points that failed in a shard, with the reasons. They stay incomplete, since no
    other shard has this shard's prompts."""
    last = {Key.of(point): point for point in _read(path, Point, settings, whole)}
    return {
        key: Failure(point.status, f"{path.resolve().name}: {point.reason}")
        for key, point in last.items()
        if point.status in ("failed", "oom")
    }


def _missing(whole: SweepSettings, records: SweepRecords) -> list[Notice]:
    """Return a warning if some points lack samples of some prompts, otherwise an empty list."""
    prompts = ({s.index for s in found.values()} for found in records.samples.values())
    most, count = max(map(len, prompts), default=0), whole.prompts["count"]
    short = [key for key in whole.measured_keys if _lacks(key, whole, records)]
    if not short:
        return []
    lack = "1 point lacks" if len(short) == 1 else f"{len(short)} points lack"
    # At request rates a shard's time windows belong together: merged folders cannot complete them.
    todo = "--resume measures them"
    if whole.offered is not None:
        todo = "finish each shard with --resume, then merge again"
    told = f"{lack} prompts: at most {most} of {count} are recorded; {todo}"
    return [Notice("points_lack_prompts", told, {"points": len(short), "most": most})]


def _environments(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the first shard's environment, and add those of the other shards if they differ."""
    found: list[dict[str, Any]] = []
    for path in paths:
        file = path / "environment.json"
        with or_setup_error(f"cannot read {file}"):
            where = json_of(file.read_bytes())
        if not isinstance(where, dict):
            raise SetupError(f"{file}: not a run's environment", "the file was damaged or edited")
        found.append(where)
    others = [where for where in found[1:] if where != found[0]]
    return found[0] | ({"other_shards": others} if others else {})
