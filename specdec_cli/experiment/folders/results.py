"""The JSON documents of commands, and the records of a single run.

Knows the contract's JSON names; knows nothing of terminals or folders.
"""

import json
from collections.abc import Sequence as Values
from typing import Any

from specdec_cli.core.figures import Metrics, Name, Record
from specdec_cli.core.types import FinishReason
from specdec_cli.errors import LOGGED, Notice
from specdec_cli.experiment.folders.conclusions import CheckResult
from specdec_cli.experiment.folders.records import Key, Point, given
from specdec_cli.recipe import Recipe
from specdec_cli.text import inert_json


class Output(Record):
    """The output of one prompt. `error` is set exactly if `finish_reason` is "error"."""

    index: int
    prompt: Name
    text: Name
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_round: list[int]
    proposed_per_round: list[int]
    category: Name | None = None
    error: Name | None = None
    seconds: float = 0.0


def generate_document(
    recipe: Recipe,
    where: dict[str, Any],
    outputs: Values[Output],
    metrics: Metrics,
    warnings: Values[Notice],
    check: CheckResult | None,
) -> dict[str, Any]:
    """The document of `generate --json`. warnings: beside those that were logged. check: of
    losslessness, if one was asked for."""
    return {
        "schema": "specdec.generate/1",
        "recipe": recipe.model_dump(mode="json"),
        "environment": where,
        "outputs": list(outputs),
        "metrics": metrics,
        "warnings": [*warnings, *LOGGED],
        **given(lossless_check=check),
    }


def to_json(document: Any) -> str:
    """One line of strict JSON, harmless on a terminal; a number that is not finite becomes null."""
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, default=_as_dict)
    except ValueError:  # there is such a number
        loose = json.dumps(document, default=_as_dict)
        text = json.dumps(json.loads(loose, parse_constant=lambda _: None), ensure_ascii=False)
    return inert_json(text)


def _as_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, Record | Notice):
        raise TypeError(f"{type(value).__name__} has no JSON form")
    return value.as_dict()


def point_of_run(
    outputs: Values[Output], metrics: Metrics, key: Key, of_engine: dict[str, Any]
) -> Point:
    """The line of points.jsonl of a single run, which has no baseline. of_engine: further fields,
    where a server ran it."""
    why = next((o.error for o in outputs if o.error is not None), None)
    could_run = any(o.error is None for o in outputs)
    return Point(
        **key.as_dict(),
        status="ok" if could_run else "failed",
        metrics=metrics if could_run else None,
        speedup=None,
        speedup_ci=None,
        predicted_speedup=None,
        mean_acceptance_length_ci=None,
        per_category={},
        **given(reason=None if could_run else f"no prompt could run: {why}"),
        **of_engine,
    )
