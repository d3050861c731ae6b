"""The JSON documents of commands, and the records of a single run.

Knows the contract's JSON names; knows nothing of terminals or folders.
"""

import json
import math
import os
import platform
from collections.abc import Sequence as Values
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch

from specdec_cli import __version__, plugin
from specdec_cli.core.figures import Metrics, Name, Record
from specdec_cli.core.types import FinishReason
from specdec_cli.engine.plan import Plan
from specdec_cli.errors import LOGGED, Notice
from specdec_cli.experiment.folders.records import Key, Point, given
from specdec_cli.recipe import Recipe
from specdec_cli.text import inert_json

_REPORTED_PACKAGES = ("torch", "transformers", "triton", "tokenizers", "safetensors", "numpy")


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


def environment(plan: Plan, device: torch.device | None = None) -> dict[str, Any]:
    """The record of the environment. An allow-list: no environment variable is copied.

    It includes the target's dtype, and which parts were compiled or captured, and why. device: the
    plan's, unless given.
    """
    device = device or plan.device
    found: dict[str, Any] = {
        "specdec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {p: v for p in _REPORTED_PACKAGES if (v := _version(p)) is not None},
        "device": str(device),
        "dtype": str(plan.target.dtype).removeprefix("torch."),
        "torch_threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        **plan.execution,
    }
    if plugin.LOADED:
        found["plugins"] = {path.name: digest for path, digest in plugin.LOADED.items()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu_memory_bytes"] = properties.total_memory
        found["cuda"] = torch.version.cuda
    return found


def generate_document(
    recipe: Recipe,
    where: dict[str, Any],
    outputs: Values[Output],
    metrics: Metrics,
    warnings: Values[Notice] = (),
) -> dict[str, Any]:
    """The document of `generate --json`. warnings: beside those that were logged."""
    return {
        "schema": "specdec.generate/1",
        "recipe": recipe.model_dump(mode="json"),
        "environment": where,
        "outputs": list(outputs),
        "metrics": metrics,
        "warnings": [*warnings, *LOGGED],
    }


def to_json(document: Any) -> str:
    """One line of strict JSON, harmless on a terminal; a number that is not finite becomes null."""
    return inert_json(json.dumps(_finite(document), ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Record | Notice):
        value = value.as_dict()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def point_record(outputs: Values[Output], metrics: Metrics, key: Key) -> dict[str, Any]:
    """The line of points.jsonl of a single run, which has no baseline."""
    could_run = any(o.error is None for o in outputs)
    why = next((o.error for o in outputs if o.error is not None), None)
    point = Point(
        **asdict(key),
        status="ok" if could_run else "failed",
        metrics=metrics if could_run else None,
        speedup=None,
        speedup_ci=None,
        predicted_speedup=None,
        mean_acceptance_length_ci=None,
        per_category={},
        **given(reason=None if could_run else f"no prompt could run: {why}"),
    )
    # In a single run the reason follows the status, unlike in the points of a sweep.
    order = () if could_run else ("k", "batch_size", "draft", "status", "reason")
    return dict.fromkeys(order) | point.as_dict()
