"""Around a sweep: from recipes to a checked plan, its folder, and what is written at the end.

Knows nothing of how points are measured or shown.
"""

import json
import logging
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, Protocol

import torch

from specdec_cli.engine.plan import Permissions
from specdec_cli.engine.synthetic import SyntheticAcceptance
from specdec_cli.errors import ExitCode, SetupError, UsageError
from specdec_cli.generation import Job, prepare
from specdec_cli.points import Point
from specdec_cli.prompts import Prompt
from specdec_cli.recipe import Recipe
from specdec_cli.results import RunFolder, environment, to_json
from specdec_cli.sweep import (
    Clock,
    Records,
    SweepPlan,
    SweepSettings,
    only,
    settings_of,
    sweep_document,
)

_log = logging.getLogger("specdec")

_SETTINGS = "settings.json"
_FEW_PROMPTS = 20


def plan_sweep(
    recipes: Sequence[Recipe],
    prompts: list[Prompt],
    ks: Sequence[int],
    batch_sizes: Sequence[int],
    permissions: Permissions,
    *,
    predict_only: bool,
    shard: tuple[int, int] | None,
) -> SweepPlan:
    """Check every pair and tokenise; a recipe for each draft, equal in everything else.

    Raises `UsageError` for a sweep without a proposer, and what `generation.prepare` raises.
    """
    largest = max(ks)
    if largest and recipes[0].speculation.method == "none":
        raise UsageError("nobody proposes: the recipe has no draft", "pass --draft, or --k 0")
    jobs = [
        prepare(for_engine(r, largest, max(batch_sizes)), prompts, permissions) for r in recipes
    ]
    names = [job.plan.proposer for job in jobs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"--draft: {twice} is there twice")
    recipe = recipes[0].model_copy(
        update={"run": recipes[0].run.model_copy(update={"batch_size": batch_sizes[0]})}
    )
    settings = settings_of(
        recipe,
        jobs,
        ks,
        batch_sizes,
        predict_only=predict_only,
        shard=shard,
        device_name=device_name(jobs[0].plan.device),
    )
    if shard is not None:
        place, count = shard
        jobs = [only(job, lambda index: index % count == place) for job in jobs]
        if not jobs[0].prompts:
            raise UsageError(
                f"shard {place}/{count} has no prompts: there are {settings.prompts['count']}"
            )
    return SweepPlan(recipe, settings, jobs)


def for_engine(recipe: Recipe, largest: int, batch_size: int) -> Recipe:
    """The recipe that engine and cache are made for: the largest k and batch size of the sweep.

    A mean length of synthetic acceptance belongs to the recipe's own k, so it is turned into rates.
    """
    speculation = recipe.speculation
    changes: dict[str, Any] = {"num_speculative_tokens": largest}
    if speculation.acceptance == "synthetic":
        rates = speculation.synthetic_acceptance_rates
        if rates is None:
            length = speculation.synthetic_acceptance_length
            assert length is not None, "the recipe's schema saw to it"
            own_k = speculation.num_speculative_tokens or largest
            conditional = SyntheticAcceptance.from_length(length, own_k).rates(largest)
            rates = tuple(accumulate(conditional, mul))
        if len(rates) < largest:
            raise UsageError(
                f"synthetic_acceptance_rates: {len(rates)} are given, and --k goes to {largest}",
                "give a rate for every position, or synthetic_acceptance_length",
            )
        changes |= {"synthetic_acceptance_rates": rates, "synthetic_acceptance_length": None}
    return recipe.model_copy(
        update={
            "speculation": speculation.model_copy(update=changes),
            "run": recipe.run.model_copy(update={"batch_size": batch_size}),
        }
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def warnings_of(plan: SweepPlan) -> list[str]:
    """What a reader of the results has to know, whatever the number of prompts."""
    found = []
    if plan.random_tokens:
        found.append(
            "the weights are random, and so is what is accepted: give acceptance with "
            "--synthetic-acceptance-length or -rates"
        )
    if plan.settings.is_synthetic:
        found.append("acceptance is synthetic: times are measured, the text is not the target's")
    return found


def few_prompts(count: int) -> list[str]:
    """A warning where there are too few prompts for narrow intervals."""
    if count >= _FEW_PROMPTS:
        return []
    return [f"{count} prompts are few: intervals are wide (--limit, --dataset)"]


def describe_plan(plan: SweepPlan, warnings: Sequence[str]) -> dict[str, Any]:
    """What a sweep would do, for `--dry-run`; `text` says it for people."""
    s, run = plan.settings, plan.recipe.run
    longest = max(job.longest_prompt for job in plan.jobs)
    most = plan.num_prompts * plan.recipe.sampling.max_new_tokens
    points = [
        {"draft": draft, "batch_size": b, "k": k, "measured": k in s.measured_ks}
        for draft, b in s.blocks
        for k in s.ks
    ]
    text = [
        f"drafts: {', '.join(str(d) for d in s.drafts)}",
        f"k: {', '.join(map(str, s.ks))}"
        + (f" (measured: {', '.join(map(str, s.measured_ks))})" if s.predict_only else ""),
        f"batch sizes: {', '.join(map(str, s.batch_sizes))}",
        f"prompts: {plan.num_prompts}"
        + (f" (shard {s.shard[0]}/{s.shard[1]} of {s.prompts['count']})" if s.shard else "")
        + f", the longest of {longest} tokens",
        f"points: {len(points)}, samples: {plan.num_samples}, each measured {run.repeats} times",
        f"tokens to write: at most {most * len(s.blocks) * len(s.measured_ks) * run.repeats:,}",
        *(f"warning: {w}" for w in warnings),
    ]
    return {
        "schema": "specdec.sweep-k.plan/1",
        "recipe": plan.recipe.model_dump(mode="json"),
        "sweep": s.as_dict() | {"settings_hash": s.digest},
        "points": points,
        "num_prompts": plan.num_prompts,
        "num_samples": plan.num_samples,
        "longest_prompt": longest,
        "repeats": run.repeats,
        "most_output_tokens_per_point": most,
        "warnings": list(warnings),
        "text": "\n".join(text),
    }


def open_folder(path: Path, plan: SweepPlan, records: Records, *, resume: bool) -> RunFolder:
    """The sweep's run folder, new or gone on with; `records` takes over what it holds.

    Raises `UsageError` when it holds a sweep with other settings, or none at all.
    """
    where = _where(plan)
    if resume and (path / _SETTINGS).exists():
        check_same(path, "sweep", read_settings(path).as_dict(), plan.settings.as_dict())
        folder = RunFolder.reopen(path)
        records.load(folder)
        warn_of_another_environment(path, where)
    else:
        folder = RunFolder.create(path, plan.recipe, where)
        write_settings(folder, plan.settings, warnings_of(plan))
    records.folder = folder
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
    """The warnings that a sweep's folder was begun with."""
    return list(read_settings_file(path)["warnings"])


def read_settings(path: Path) -> SweepSettings:
    """The settings of a sweep's folder. Raises `UsageError` when it is none."""
    try:
        return SweepSettings.of_dict(read_settings_file(path)["settings"])
    except (KeyError, TypeError, ValueError) as problem:
        raise SetupError(f"{path / _SETTINGS}: no settings of a sweep: {problem!r}") from None


def read_settings_file(path: Path) -> dict[str, Any]:
    """settings.json of a folder. Raises `UsageError` where there is none."""
    try:
        found: dict[str, Any] = json.loads((path / _SETTINGS).read_text(encoding="utf-8"))
        return found
    except FileNotFoundError:
        raise UsageError(f"{path} is no folder of a sweep: it has no {_SETTINGS}") from None
    except (OSError, ValueError) as problem:
        raise SetupError(f"cannot read {path / _SETTINGS}: {problem}") from None


def first_difference(ours: Any, theirs: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """The first dotted key at which two documents differ, with both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in [*ours, *(n for n in theirs if n not in ours)]:
            inner = f"{key}.{name}" if key else str(name)
            if found := first_difference(ours.get(name), theirs.get(name), inner):
                return found
        return None
    return None if ours == theirs else (key, ours, theirs)


def check_same(path: Path, what: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raises `UsageError` where the settings that a folder was begun with are not ours."""
    found = first_difference(theirs, ours)
    if found is not None:
        key, there, now = found
        raise UsageError(
            f"{path} holds a {what} with other settings: {key.removeprefix('recipe.')} is "
            f"{to_json(there)} there and {to_json(now)} now",
            "resume with the same options, or name another folder with -o",
        )


def warn_of_another_environment(path: Path, where: dict[str, Any]) -> None:
    """Samples measured with other versions are kept; their times may differ for that reason."""
    try:
        earlier = json.loads((path / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if (found := first_difference(earlier, json.loads(to_json(where)))) is not None:
        key, there, now = found
        _log.warning("%s was begun elsewhere: %s was %r and is %r", path, key, there, now)


def finish(
    plan: SweepPlan,
    records: Records,
    points: Sequence[Point],
    warnings: Sequence[str],
    clock: Clock,
    folder: RunFolder | None,
) -> dict[str, Any]:
    """The sweep's document, also written as the folder's summary."""
    recipe = plan.recipe.model_dump(mode="json")
    document = sweep_document(plan.settings, recipe, _where(plan), records, points, warnings, clock)
    if folder is not None:
        folder.write("summary.json", to_json(document) + "\n")
    return document


def exit_code(document: dict[str, Any], records: Records) -> ExitCode:
    """Partial where a point or a prompt failed; where no point is left, what stopped them all."""
    statuses = [p["status"] for p in document["points"] if p["status"] != "skipped"]
    samples = [s for found in records.samples.values() for s in found.values()]
    if not samples and "ok" not in statuses:
        only_memory = set(statuses) == {"oom"}
        return ExitCode.ENVIRONMENT if only_memory else ExitCode.RUN_FAILED
    failed = set(statuses) != {"ok"} or any(s["finish_reason"] == "error" for s in samples)
    return ExitCode.PARTIAL if failed else ExitCode.OK


def _where(plan: SweepPlan) -> dict[str, Any]:
    job: Job = plan.jobs[0]
    found = environment(job.plan.device, job.plan.target.dtype, job.plan.execution)
    return found | {
        "cache": "sized for the largest k and batch size, the same at every point, k = 0 included"
    }
