"""Open checkpoint files and read their tensors, with clear errors for files that cannot be
opened."""

import json
import logging
import os
import re
import zipfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from specdec_kernels.linear.stored import Storage

from specdec_cli.errors import SetupError
from specdec_cli.models.config_file import unreadable
from specdec_cli.models.gguf.files import read_model
from specdec_cli.models.gguf.header import is_gguf
from specdec_cli.text import first_line, one_line

_log = logging.getLogger("specdec")
_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
_INDEX_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor of `shape`. The tensor consists of `blocks` equal blocks along dimension
    `dim`, and the part has the entries start..stop of each block."""

    dim: int
    start: int
    stop: int
    shape: tuple[int, ...]
    blocks: int = 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        width = self.blocks * (self.stop - self.start)
        return (*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this part of `whole`: a view if there is one block, otherwise a copy. Raises
        `WrongShape` if `whole` does not have the shape `shape`."""
        if tuple(whole.shape) != self.shape:
            raise WrongShape(tuple(whole.shape))
        width = self.stop - self.start
        found = [b.narrow(self.dim, self.start, width) for b in whole.chunk(self.blocks, self.dim)]
        return found[0] if self.blocks == 1 else torch.cat(found, self.dim)


class WrongShape(Exception):
    """Raised if the shape of a tensor, `found`, is not the expected one."""

    def __init__(self, found: tuple[int, ...]) -> None:
        super().__init__()
        self.found = found


class Read(Protocol):
    """Reads one tensor, or only a part of it if the file's format allows that."""

    def __call__(self, part: Part | None = None) -> torch.Tensor: ...


class Fields(NamedTuple):
    """Readers of a checkpoint's tensors, and how quantised weights are stored. The keys are the
    names of the weights.

    codes: readers of the codes of quantised weights, and of all tensors that are not quantised.
    scales, zeros: readers of the scales and zero points of quantised weights, as in `ops.Stored`.
    storages: how each quantised weight is stored.
    """

    codes: dict[str, Read]
    scales: dict[str, Read]
    zeros: dict[str, Read]
    storages: dict[str, Storage]


@contextmanager
def open_checkpoint(folder: Path, allow_pickle: bool) -> Iterator[dict[str, Read]]:
    """Open the checkpoint in `folder` and yield readers of its tensors, by name.

    Raises `SetupError` for a folder without weights, one with pickled weights only (unless
    `allow_pickle`), a missing shard, or a damaged file.
    """
    is_safe = bool(_files(folder, _SAFE))
    if not (files := weight_files(folder)):
        raise SetupError(
            f"no weights in {folder}",
            "the folder needs model.safetensors (pickled weights of a hub id are downloaded only "
            "with --allow-pickle), or load_format: dummy for random weights",
        )
    if not (is_safe or allow_pickle):
        raise SetupError(
            f"{folder} has pickled weights only ({files[0].name}), which can run code",
            "convert them to safetensors, or pass --allow-pickle if you trust them",
        )
    tensors: dict[str, Read] = {}
    if files == [folder / _SAFE] and (stale := folder / f"{_SAFE}.index.json").is_file():
        _log.warning(
            "%s holds %s and also %s, an index of other files: the index is ignored",
            *(folder, _SAFE, stale.name),
        )
    with ExitStack() as stack:
        for file in files:
            tensors |= _open_safetensors(file, stack) if is_safe else _open_pickle(file)
        yield tensors


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint, or an empty list if it has none. Raises `SetupError`
    for a missing shard or a bad index."""
    return _files(folder, _SAFE) or _files(folder, _PICKLED)


def _files(folder: Path, name: str) -> list[Path]:
    """Return the files of a checkpoint: a single file, which takes precedence over an index, or the
    shards that an index lists."""
    if (single := folder / name).is_file():
        return [single]
    if (index := _index(folder, name)) is not None:
        # An index could name files anywhere, so take them only from its own folder.
        files = [folder / shard for shard in sorted({Path(s).name for s in index.values()})]
        # Path.is_file would raise an error for a name that is too long.
        missing = [f.name for f in files if not os.path.isfile(f)]
        if missing:
            raise SetupError(
                f"{folder} lacks {len(missing)} of {len(files)} weight files, first "
                f"{one_line(missing[0])}",
                "download the model again",
            )
        return files
    return []


def _index(folder: Path, name: str) -> dict[str, str] | None:
    """Return a checkpoint's index, which maps each tensor's name to the name of its file; None if
    it has no index. Raises `SetupError` for a damaged index."""
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return None
    try:
        if index.stat().st_size > _INDEX_BYTES:
            raise ValueError(f"larger than {_INDEX_BYTES >> 20} MiB")
        found: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(file, str) for file in found.values()):
            raise ValueError("a file's name is not text")
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as problem:
        raise SetupError(
            f"{index} is not a weight index: {first_line(problem)}", "download the model again"
        ) from None
    return found


def layers_held(place: Path) -> int | None:
    """Return the number of layers, according to the layer numbers in the tensors' names.

    Returns None if no name contains a layer number, or if an index or file is damaged. Loading will
    report the damage.
    """
    names, number = tensor_names(place), r"(?:^|\.)(\d{1,9})\."
    if is_gguf(place):
        names, number = read_model(place).tensors, r"^blk\.(\d{1,9})\."
    found = filter(None, (re.search(number, name) for name in names))
    return max((int(match[1]) + 1 for match in found), default=None)


def tensor_names(folder: Path) -> Collection[str]:
    """Return the names of the tensors in a folder. Return an empty collection if its index or file
    is damaged, or if it has only a single pickled file, which is not opened here."""
    names: Collection[str] = ()
    with suppress(SetupError), ExitStack() as stack:
        if (file := folder / _SAFE).is_file():
            names = _open_safetensors(file, stack).keys()
        else:
            names = _index(folder, _SAFE) or _index(folder, _PICKLED) or ()
    return names


def _open_safetensors(file: Path, stack: ExitStack) -> dict[str, Read]:
    try:
        handle: Any = stack.enter_context(safe_open(str(file), framework="pt"))
    except (SafetensorError, OSError) as problem:
        raise _damaged(file, problem) from None

    return {name: partial(_read_safetensors, file, handle, name) for name in handle.keys()}


def _read_safetensors(file: Path, handle: Any, name: str, part: Part | None = None) -> torch.Tensor:
    try:
        if part is None or part.blocks > 1:
            return same(handle.get_tensor(name), part)
        stored = handle.get_slice(name)
        if tuple(stored.get_shape()) != part.shape:
            raise WrongShape(tuple(stored.get_shape()))
        places = [slice(None)] * part.dim + [slice(part.start, part.stop)]
        tensor: torch.Tensor = stored[tuple(places)]
    except (SafetensorError, OSError) as problem:
        raise _damaged(file, problem) from None
    return tensor


def _open_pickle(file: Path) -> dict[str, Read]:
    try:
        # Files from before torch 1.6 are not zip archives and cannot be mapped.
        loaded = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except Exception as problem:
        raise _damaged(file, problem) from None
    if not isinstance(loaded, dict):
        raise _damaged(file, ValueError("not a dictionary of tensors"))
    return {name: partial(same, tensor) for name, tensor in loaded.items()}


def same(tensor: torch.Tensor, part: Part | None = None) -> torch.Tensor:
    """Return `tensor`, or a part of it. `partial(same, tensor)` makes a `Read` of a tensor that is
    already in memory."""
    return tensor if part is None else part.of(tensor)


def unread(part: Part | None = None) -> torch.Tensor:
    """Stand in for a `Read` where only the names of tensors are needed. Raises `AssertionError` if
    it is called."""
    raise AssertionError("only its name is used")


def _damaged(file: Path, problem: Exception) -> SetupError:
    hint = "the file is truncated or damaged; download it again"
    return unreadable(file, f"the weights in {file}", problem, hint)
