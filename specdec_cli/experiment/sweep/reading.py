"""Records of a sweep's folder, checked as they are read.

Knows what points and predictions are computed from; computes nothing.
"""

from functools import partial
from pathlib import Path
from typing import Any

from specdec_cli.experiment.reading import (
    KEY,
    SAMPLE,
    Fields,
    Record,
    is_count,
    is_number,
    is_text,
    is_whole,
    list_of,
    or_none,
    problem_of_sample,
    read_checked,
)
from specdec_cli.experiment.sweep.sweep_settings import SweepSettings


def read_kept(folder: Path, name: str, settings: SweepSettings) -> list[Record]:
    """The records of one of a sweep's .jsonl files.

    Raises `SetupError` for a record that lacks something, or is of no point of the sweep.
    """
    return read_checked(
        folder / name, _FIELDS[name], partial(_problem, name=name, settings=settings)
    )


def _problem(record: Record, name: str, settings: SweepSettings) -> str | None:
    if record["draft"] not in settings.drafts:
        return f"its draft is {record['draft']}"
    if "k" in record and record["k"] not in settings.ks:
        return f"its k is {record['k']}"
    if "batch_size" in record and record["batch_size"] not in settings.batch_sizes:
        return f"its batch_size is {record['batch_size']}"
    if name == "samples.jsonl":
        repeats = settings.recipe["run"]["repeats"]
        return problem_of_sample(record, settings.prompts["count"], repeats)
    if name == "replay.jsonl":
        known = [record[field] is not None for field in ("accept", "chains", "draws")]
        return None if sum(known) == 1 else "it has not one of accept, chains and draws"
    if name == "curve.jsonl" and not is_number(record.get("broadcast_ms", 0.0)):
        return "broadcast_ms is damaged"
    if record.get("status") in ("failed", "oom") and not is_text(record.get("reason")):
        return "it has no reason"
    return None


def _is_chain(value: Any) -> bool:
    return list_of(is_count)(value) and len(value) == 2


_FIELDS: dict[str, Fields] = {
    "samples.jsonl": SAMPLE,
    "replay.jsonl": {
        "draft": or_none(is_text),
        "index": is_count,
        "limit": is_count,
        "draft_limit": is_whole,  # below 0 where the prompt is longer than the draft's context
        "chains": or_none(list_of(_is_chain)),
        **dict.fromkeys(("accept", "draws", "rates", "overlap"), or_none(list_of(is_number))),
    },
    "curve.jsonl": {
        **KEY,
        "part": is_count,
        **dict.fromkeys(
            ("rounds", "sequence_rounds", "decode_seconds", "draft_ms", "verify_ms", "sample_ms"),
            is_number,
        ),
    },
    "points.jsonl": {**KEY, "status": is_text},
}
