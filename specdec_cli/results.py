"""The documents that commands give out, and the run folder that they are kept in.

Knows the contract's JSON names; knows nothing of terminals.
"""

import fcntl
import json
import logging
import math
import os
import platform
from collections.abc import Sequence as Values
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from specdec_cli import __version__
from specdec_cli.engine.metrics import Metrics
from specdec_cli.engine.types import FinishReason
from specdec_cli.errors import SetupError, UsageError
from specdec_cli.recipe import Recipe, dump_recipe
from specdec_cli.text import inert_json, is_unicode, one_line

_log = logging.getLogger("specdec")
_RECORDS = ("samples.jsonl", "points.jsonl")
_REPORTED_PACKAGES = ("torch", "transformers", "triton", "tokenizers", "safetensors", "numpy")


@dataclass(frozen=True, slots=True)
class Output:
    """What one prompt gave. `error` is set exactly when `finish_reason` is "error"."""

    index: int
    prompt: str
    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_round: list[int]
    proposed_per_round: list[int]
    category: str | None = None
    error: str | None = None
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        for optional in ("category", "error"):
            if found[optional] is None:
                del found[optional]
        return found


def environment(
    device: torch.device, dtype: torch.dtype, execution: dict[str, str]
) -> dict[str, Any]:
    """Where the numbers come from. An allow-list: no environment variable is ever copied.

    dtype: the target's. execution: what was compiled or captured, and why.
    """
    found: dict[str, Any] = {
        "specdec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {p: v for p in _REPORTED_PACKAGES if (v := _version(p)) is not None},
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "torch_threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        **execution,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu_memory_bytes"] = properties.total_memory
        found["cuda"] = torch.version.cuda
    return found


def generate_document(
    recipe: Recipe, where: dict[str, Any], outputs: Values[Output], metrics: Metrics
) -> dict[str, Any]:
    """`generate --json`."""
    return {
        "schema": "specdec.generate/1",
        "recipe": recipe.model_dump(mode="json"),
        "environment": where,
        "outputs": [o.as_dict() for o in outputs],
        "metrics": metrics.as_dict(),
    }


def to_json(document: Any) -> str:
    """One line of strict JSON, harmless on a terminal; a number that is not finite becomes null."""
    return inert_json(json.dumps(_finite(document), ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
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


@dataclass(slots=True)
class RunFolder:
    """A folder of results: what a record has been acknowledged for survives a crash.

    Raises `SetupError` when the folder cannot be written, and `UsageError` when it holds the
    results of another run.
    """

    path: Path
    _files: dict[str, int] = field(default_factory=dict)

    @classmethod
    def reopen(cls, path: Path) -> "RunFolder":
        """A folder that a run left behind, mended."""
        folder = cls(path)
        folder._claim()
        folder.mend()
        return folder

    @classmethod
    def create(cls, path: Path, recipe: Recipe, where: dict[str, Any]) -> "RunFolder":
        folder = cls(path)
        recipe = found_from_anywhere(recipe)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder._claim()
            earlier = [n for n in _RECORDS if (path / n).exists() and (path / n).stat().st_size]
        except OSError as problem:
            raise SetupError(
                f"cannot create the folder {path}: {problem.strerror}", "name another with -o"
            ) from None
        if earlier:
            folder.close()
            raise UsageError(
                f"{path} holds the results of an earlier run ({earlier[0]})",
                "name another folder with -o, or move that one away",
            )
        if _is_foreign(path / "recipe.yaml"):
            folder.close()
            raise UsageError(
                f"{path / 'recipe.yaml'} was not written by a run, and would be replaced",
                "name another folder with -o, or move that file away",
            )
        folder.write("recipe.yaml", dump_recipe(recipe))
        folder.write("environment.json", to_json(where) + "\n")
        return folder

    def mend(self) -> None:
        """Cut off what a crash left of a last line."""
        for file in sorted(self.path.glob("*.jsonl")):
            _cut_torn_line(file)

    def _claim(self) -> None:
        """Keep others that begin or go on with a run out, until this process closes or ends."""
        try:
            self._files["."] = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._files["."], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UsageError(
                f"{self.path}: another process is writing there",
                "wait until it has ended, or name another folder with -o",
            ) from None
        except OSError as problem:  # a file system without locks
            _log.info("%s is not locked: %s", self.path, problem.strerror)

    def append(self, name: str, *records: dict[str, Any]) -> None:
        """Add a line a record to a .jsonl file: a single write, synced before this returns."""
        line = "".join(to_json(record) + "\n" for record in records).encode()
        try:
            if name not in self._files:
                # Of a run that goes on: should it be cut short, nothing is to speak for it but
                # its records.
                (self.path / "summary.json").unlink(missing_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                self._files[name] = os.open(self.path / name, flags, 0o644)
            written = os.write(self._files[name], line)
            if written != len(line):
                raise OSError("the disk took only part of a record")
            os.fsync(self._files[name])
        except OSError as problem:
            why = problem.strerror or problem
            raise SetupError(f"cannot write {self.path / name}: {why}") from None

    def write(self, name: str, text: str) -> None:
        """Replace a file as a whole, or leave the old one."""
        temporary = self.path / f".{name}.tmp"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path / name)
        except OSError as problem:
            with suppress(OSError):
                temporary.unlink()
            raise SetupError(f"cannot write {self.path / name}: {problem.strerror}") from None

    def forget(self, name: str) -> None:
        """Take away a file of records that stand for nothing."""
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as problem:
            raise SetupError(f"cannot remove {self.path / name}: {problem.strerror}") from None

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


def found_from_anywhere(recipe: Recipe) -> Recipe:
    """`recipe` with full paths of what lies on this machine: it may be run again from elsewhere.

    Raises `UsageError` for a path that no recipe can name.
    """
    changes = {}
    for section, key in (("target", "model"), ("draft", "model"), ("data", "path")):
        values = getattr(recipe, section)
        if values is not None and os.path.exists(path := getattr(values, key)):
            full = os.path.abspath(path)
            if not is_unicode(full):
                raise UsageError(
                    f"{section}.{key}: {one_line(full)} is not valid Unicode, so no recipe could "
                    "name it",
                    "rename that folder",
                )
            changes[section] = values.model_copy(update={key: full})
    return recipe.model_copy(update=changes)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file; a last line without its end is left out.

    Raises `SetupError` for a file that cannot be read, or holds a line that is no record.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise SetupError(f"cannot read {path}: {problem.strerror}") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise SetupError(f"{path}:{number}: not a record", "the file was damaged or edited")
        records.append(record)
    return records


def _is_foreign(path: Path) -> bool:
    """Whether a recipe is of somebody's own writing: ours have every section, and no comments."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return False
    sections = {line.partition(b":")[0].decode(errors="replace") for line in lines}
    is_commented = any(line.lstrip().startswith(b"#") for line in lines)
    return bool(lines) and (is_commented or not sections >= Recipe.model_fields.keys())


def _cut_torn_line(path: Path) -> None:
    try:
        content = path.read_bytes()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            os.truncate(path, end)
            _log.warning(
                "%s: cut off %d bytes of a record that a crash left unfinished",
                path,
                len(content) - end,
            )
    except OSError as problem:
        raise SetupError(f"cannot repair {path}: {problem.strerror}") from None


def point_record(
    outputs: Values[Output], metrics: Metrics, draft: str | None, k: int, batch_size: int
) -> dict[str, Any]:
    """The line of points.jsonl of a single run, which compares with nothing."""
    could_run = any(o.error is None for o in outputs)
    why = next((o.error for o in outputs if o.error is not None), None)
    return {
        "k": k,
        "batch_size": batch_size,
        "draft": draft,
        "status": "ok" if could_run else "failed",
        **({} if could_run else {"reason": f"no prompt could run: {why}"}),
        "metrics": metrics.as_dict() if could_run else None,
        "speedup": None,
        "speedup_ci": None,
        "predicted_speedup": None,
        "mean_acceptance_length_ci": None,
        "per_category": {},
    }


def sample_record(output: Output, draft: str | None, k: int, batch_size: int) -> dict[str, Any]:
    """A line of samples.jsonl."""
    record: dict[str, Any] = {
        "draft": draft,
        "k": k,
        "batch_size": batch_size,
        "index": output.index,
        "category": output.category,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "accepted_per_round": output.accepted_per_round,
        "seconds": [output.seconds],
    }
    return record if output.error is None else record | {"error": output.error}
