"""Records of a sweep's folder, checked as they are read: a file may have been damaged or edited.

Knows what points and predictions are computed from; computes nothing.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specdec_cli.errors import SetupError
from specdec_cli.results import read_records
from specdec_cli.sweep.settings import SweepSettings

Check = Callable[[Any], bool]


def read_kept(folder: Path, name: str, settings: SweepSettings) -> list[dict[str, Any]]:
    """The records of one of a sweep's .jsonl files.

    Raises `SetupError` for a record that lacks something, or is of no point of the sweep.
    """
    records = read_records(folder / name)
    for number, record in enumerate(records, start=1):
        if (problem := _problem(record, name, settings)) is not None:
            raise SetupError(
                f"{folder / name}:{number}: not a record of this sweep: {problem}",
                "the file was damaged or edited",
            )
    return records


def _problem(record: Mapping[str, Any], name: str, settings: SweepSettings) -> str | None:
    for field, check in _FIELDS[name].items():
        if field not in record:
            return f"it has no {field}"
        if not check(record[field]):
            return f"{field} is damaged"
    if record["draft"] not in settings.drafts:
        return f"its draft is {record['draft']}"
    if "k" in record and record["k"] not in settings.ks:
        return f"its k is {record['k']}"
    if "batch_size" in record and record["batch_size"] not in settings.batch_sizes:
        return f"its batch_size is {record['batch_size']}"
    if name == "samples.jsonl":
        return _problem_of_rounds(record)
    if name == "replay.jsonl":
        known = [record[field] is not None for field in ("accept", "chains", "draws")]
        return None if sum(known) == 1 else "it has not one of accept, chains and draws"
    if record.get("status") in ("failed", "oom") and not _is_text(record.get("reason")):
        return "it has no reason"
    return None


def _problem_of_rounds(sample: Mapping[str, Any]) -> str | None:
    proposed, accepted = sample["proposed_per_round"], sample["accepted_per_round"]
    if len(proposed) != len(accepted):
        return "accepted_per_round and proposed_per_round differ in length"
    if any(a > p or p > sample["k"] for p, a in zip(proposed, accepted, strict=True)):
        return "more was accepted than proposed, or more proposed than k"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_stages(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_list_of(_is_number), value.values()))


def _is_chain(value: Any) -> bool:
    return _list_of(_is_count)(value) and len(value) == 2


_KEY: dict[str, Check] = {"draft": _or_none(_is_text), "k": _is_count, "batch_size": _is_count}
_FIELDS: dict[str, dict[str, Check]] = {
    "samples.jsonl": _KEY
    | {
        "index": _is_count,
        "category": _or_none(_is_text),
        "finish_reason": _is_text,
        "rounds_without_proposal": _is_count,
        "num_preemptions": _is_count,
        "peak_memory_bytes": _is_count,
        "stage_ms": _is_stages,
    }
    | dict.fromkeys(
        ("prompt_token_ids", "token_ids", "accepted_per_round", "proposed_per_round"),
        _list_of(_is_count),
    )
    | dict.fromkeys(
        ("seconds", "decode_seconds", "round_share", "ttft_ms", "tpot_ms"), _list_of(_is_number)
    ),
    "replay.jsonl": {
        "draft": _or_none(_is_text),
        "index": _is_count,
        "limit": _is_number,
        "draft_limit": _is_number,
        "chains": _or_none(_list_of(_is_chain)),
    }
    | dict.fromkeys(("accept", "draws", "rates", "overlap"), _or_none(_list_of(_is_number))),
    "curve.jsonl": _KEY
    | {"part": _is_count}
    | dict.fromkeys(
        ("rounds", "sequence_rounds", "decode_seconds", "draft_ms", "verify_ms", "sample_ms"),
        _is_number,
    ),
    "points.jsonl": _KEY | {"status": _is_text},
}
