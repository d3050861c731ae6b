"""Parses the option values of `specdec sweep-k`: lists of numbers, objectives and shards.

Each function raises a `UsageError` that names the option if the text is not valid.
"""

import re
from collections.abc import Mapping, Sequence

from specdec_cli.errors import UsageError

_LARGEST = 1024


def listed_ks(text: str) -> list[int]:
    """Parse `0-8`, `1,2,4` or a mixture into ascending numbers."""
    found = set[int]()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?", part)
        if match is None:
            raise UsageError(f"--k: expected numbers such as 0-8 or 0,1,2,4, got {text!r}")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low or high > _LARGEST:
            why = (
                "falls: the smaller number comes first"
                if high < low
                else f"is more than {_LARGEST}"
            )
            raise UsageError(f"--k: {part.strip()} {why}")
        found |= set(range(low, high + 1))
    return sorted(found)


def parse_list(text: str | None, option: str) -> object:
    """Parse `1,4,inf` into a list for the recipe, whose schema checks the values; None for an
    option that was not given."""
    from specdec_cli.recipe.source import parse_value

    return None if text is None else parse_value(f"[{text.strip('[] ').lower()}]", option)


def parse_slo(given: Sequence[str] | None) -> dict[str, str] | None:
    """Parse values such as `ttft:500ms` into {"ttft": "500ms"}; None if the option was not given.

    The recipe's schema checks names and times. Raises `UsageError` if a value is not one name and
    one time, or if a name is given twice.
    """
    found = dict[str, str]()
    for one in given or ():
        name, colon, time = (part.strip() for part in one.partition(":"))
        if not colon or "," in one:
            raise UsageError(
                f"--slo: expected NAME:TIME such as ttft:500ms, got {one!r}",
                "repeat --slo for each objective",
            )
        if name in found:
            raise UsageError(f"--slo {one}: {name} is given twice")
        found[name] = time
    return found or None


def refuse_beside(option: str, **unfit: object) -> None:
    """Raise `UsageError` if `option` is used together with an option that it excludes.

    option: the flag, such as `--server`. unfit: the values of the excluded options, by parameter
    name; an option that was not given has a false value.
    """
    for name, value in unfit.items():
        if value:
            flag = f"--{name.replace('_', '-')}"
            hint = f"leave {flag} out"
            if name == "batch_size" and option == "--request-rate":
                hint = "limit concurrent requests with --max-concurrency"
            raise UsageError(f"{flag} and {option} exclude each other", hint)


def shard_of(text: str | None, environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the shard's index and the number of shards, from the option or else from a Slurm array
    task. None if the run has no shards."""
    if text is None:
        return _slurm_shard(environ)
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip())
    if match is None:
        raise UsageError(f"--shard: expected I/N such as 0/4, got {text!r}")
    place, count = int(match[1]), int(match[2])
    if place >= count:
        hint = f"shards are counted from 0: 0/{count} to {count - 1}/{count}" if count else None
        raise UsageError(f"--shard: there is no shard {text}", hint)
    return (place, count) if count > 1 else None


def is_lone_task(environ: Mapping[str, str]) -> bool:
    """Return True in an array of one Slurm task that is not task 0. Such an array is usually a task
    of a larger one that is submitted again."""
    task, count = (environ.get(f"SLURM_ARRAY_TASK_{name}", "") for name in ("ID", "COUNT"))
    return count == "1" and task.isdigit() and int(task) > 0


def _slurm_shard(environ: Mapping[str, str]) -> tuple[int, int] | None:
    task, count = (environ.get(f"SLURM_ARRAY_TASK_{name}", "") for name in ("ID", "COUNT"))
    first, step = (environ.get(f"SLURM_ARRAY_TASK_{name}", "") for name in ("MIN", "STEP"))
    if not (task.isdigit() and count.isdigit()) or int(count) < 2:
        return None
    apart = max(1, int(step)) if step.isdigit() else 1
    place = (int(task) - int(first if first.isdigit() else 0)) // apart
    if not 0 <= place < int(count):
        raise UsageError(
            f"SLURM_ARRAY_TASK_ID is {task}, which is not a shard of an array of {count}",
            "pass --shard I/N",
        )
    return place, int(count)
