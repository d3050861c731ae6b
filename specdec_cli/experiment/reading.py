"""Records of a run folder, checked as they are read: a file may have been damaged or edited.

Knows what points are computed from; computes nothing.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from specdec_cli.core.types import FinishReason
from specdec_cli.errors import SetupError
from specdec_cli.experiment.run_folder import read_records

Record = dict[str, Any]
Check = Callable[[Any], bool]
Fields = Mapping[str, Check]


def read_checked(
    path: Path, fields: Fields, further: Callable[[Record], str | None] = lambda _: None
) -> list[Record]:
    """The records of a .jsonl file, none where there is no such file.

    fields: what each has, and of which kind. further: what else is wrong with a record that has
    them all. Raises `SetupError` for one that lacks something, and as `read_records` does.
    """
    records = read_records(path)
    for number, record in enumerate(records, start=1):
        problem = _problem(record, fields)
        problem = further(record) if problem is None else problem
        if problem is not None:
            raise SetupError(
                f"{path}:{number}: not a record of this run: {problem}",
                "the file was damaged or edited",
            )
    return records


def _problem(record: Record, fields: Fields) -> str | None:
    for field, check in fields.items():
        if field not in record:
            return f"it has no {field}"
        if not check(record[field]):
            return f"{field} is damaged"
    return None


_LONGEST = 1e12  # milliseconds: 30 years
_MOST = 2**63  # what a column of numbers can hold; Python's own whole numbers have no end


def is_whole(value: Any) -> bool:
    return type(value) is int and -_MOST < value < _MOST


def is_count(value: Any) -> bool:
    return is_whole(value) and value >= 0


def is_number(value: Any) -> bool:
    return is_whole(value) or (type(value) is float and math.isfinite(value))


def is_time(value: Any) -> bool:
    """Seconds, milliseconds or a share; sums of many are still finite."""
    return is_number(value) and 0 <= value < _LONGEST


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def is_stages(value: Any) -> bool:
    return isinstance(value, dict) and all(map(list_of(is_time), value.values()))


KEY: Fields = {"draft": or_none(is_text), "k": is_count, "batch_size": is_count}
SAMPLE: Fields = {
    **KEY,
    "index": is_count,
    "category": or_none(is_text),
    "finish_reason": is_text,
    "rounds_without_proposal": is_count,
    "num_preemptions": is_count,
    "peak_memory_bytes": is_count,
    "stage_ms": is_stages,
    **dict.fromkeys(
        ("prompt_token_ids", "token_ids", "accepted_per_round", "proposed_per_round"),
        list_of(is_count),
    ),
    **dict.fromkeys(
        ("seconds", "decode_seconds", "round_share", "ttft_ms", "tpot_ms"), list_of(is_time)
    ),
}


def problem_of_sample(sample: Record, num_prompts: int, repeats: int) -> str | None:
    """What cannot be in a sample that has all fields, of so many prompts, each measured `repeats`
    times."""
    proposed, accepted = sample["proposed_per_round"], sample["accepted_per_round"]
    if sample["index"] >= num_prompts:
        return f"its index is {sample['index']}, of {num_prompts} prompts"
    if sample["finish_reason"] not in get_args(FinishReason):
        return f"its finish_reason is {sample['finish_reason']}"
    for name in ("seconds", "decode_seconds", "round_share"):
        if len(sample[name]) != repeats:
            return f"{name} has not {repeats} numbers, one a repeat"
    if len(proposed) != len(accepted):
        return "accepted_per_round and proposed_per_round differ in length"
    if any(a > p or p > sample["k"] for p, a in zip(proposed, accepted, strict=True)):
        return "more was accepted than proposed, or more proposed than k"
    return None
