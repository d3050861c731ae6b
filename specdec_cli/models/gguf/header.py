"""Read the header of a GGUF file. Every count, length and offset in it is checked against the size
of the file."""

import mmap
import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from specdec_cli.errors import SetupError
from specdec_cli.text import first_line, one_line

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_SCALARS |= {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
# The maximum number of strings in all arrays together. The largest models have 1 << 20 tokens and
# merges.
_MOST_STRINGS = 1 << 22
_MOST_NUMBERS = 1 << 22  # maximum number of values in one array
_MOST_KEYS, _MOST_TENSORS = 1 << 16, 1 << 20
_NAME_BYTES = 1 << 12
_MOST_DIMS = 4
_MOST_ALIGNMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The location, shape and type of a tensor in a file.

    shape: the slowest dimension comes first.
    kind: the number of the GGML type.
    start: the offset from the beginning of the file, in bytes.
    nbytes: the size in bytes.
    scale: the place of the tensor's scale, by which its values are multiplied; None if there is no
        scale.
    """

    file: Path
    shape: tuple[int, ...]
    kind: int
    start: int
    nbytes: int
    scale: "TensorPlace | None" = None


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a GGUF file.

    values: the metadata by key. Arrays are lists.
    tensors: each tensor's place in the file, by the tensor's name.
    size: the length of the header in bytes.
    """

    file: Path
    values: dict[str, Any]
    tensors: dict[str, TensorPlace]
    size: int


def read_header(file: Path) -> Header:
    """Return the header of a GGUF file. Raises `SetupError` if the file is not a GGUF file, is cut
    off or contradicts itself."""
    try:
        status = file.stat()
        return _read(file, status.st_size, status.st_mtime_ns)
    except ImportError:
        raise SetupError(
            "reading GGUF files needs the Python package gguf", "install it: pip install gguf"
        ) from None
    except OSError as problem:
        raise SetupError(f"cannot read {file}: {problem.strerror}", "is the path right?") from None
    except (ValueError, OverflowError, struct.error) as problem:
        raise SetupError(
            f"cannot read the GGUF file {file}: {first_line(problem)}",
            "the file is truncated or damaged; download it again",
        ) from None


@lru_cache(maxsize=16)
def _read(file: Path, size: int, changed: int) -> Header:
    """Read the header of a file. Results are cached by path, size in bytes and modification time
    (`changed`), so a file that has changed is read again."""
    if not file.is_file():
        raise ValueError("it is not a regular file")
    if size < 24:
        raise ValueError(f"it has {size} bytes, but a GGUF header has at least 24")
    with file.open("rb") as stream:
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _HeaderReader(file, content, size).read()


class _HeaderReader:
    """Reads a header from front to back. at: the offset of the next byte."""

    def __init__(self, file: Path, content: mmap.mmap, size: int) -> None:
        self.file, self.content, self.size, self.at = file, content, size, 0
        self.strings = 0

    def read(self) -> Header:
        if self.take(4, "its first bytes") != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, tensors, keys = self.numbers("IQQ", "its counts")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise ValueError(f"its version is {version}; only {known} are supported")
        self.fits(keys, 13, "keys", _MOST_KEYS)
        values: dict[str, Any] = {}
        for _ in range(keys):
            key = self.text("a key", _NAME_BYTES)
            if key in values:
                raise ValueError(f"it has the key {one_line(key)} twice")
            (kind,) = self.numbers("I", one_line(key))
            values[key] = self.value(kind, one_line(key))
        self.fits(tensors, 32, "tensors", _MOST_TENSORS)
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            name = self.text("a tensor's name", _NAME_BYTES)
            if name in entries:
                raise ValueError(f"it has the tensor {one_line(name)} twice")
            entries[name] = self.entry(one_line(name))
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MOST_ALIGNMENT:
            raise ValueError(f"general.alignment must be a number from 1 to {_MOST_ALIGNMENT}")
        begin = -(-self.at // alignment) * alignment
        placed = {n: self.placed(n, begin, *entry) for n, entry in entries.items()}
        return Header(self.file, values, placed, self.at)

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            raise ValueError(
                f"{what} extends {count - self.size + self.at} bytes past the end of the file"
            )
        self.at += count
        return self.content[self.at - count : self.at]

    def numbers(self, form: str, what: str) -> tuple[Any, ...]:
        form = f"<{form}"
        return struct.unpack(form, self.take(struct.calcsize(form), what))

    def fits(self, count: int, least: int, what: str, most: int | None = None) -> None:
        """Raise `ValueError` if the rest of the file is too short for `count` items of at least
        `least` bytes each, or if `count` exceeds `most` (None for no limit)."""
        if count * least > self.size - self.at:
            raise ValueError(f"its header declares {count} {what}, more than the file can hold")
        if most is not None and count > most:
            raise ValueError(f"its header declares {count} {what}, more than the limit of {most}")

    def text(self, what: str, most: int | None = None) -> str:
        (length,) = self.numbers("Q", what)
        if most is not None and length > most:
            raise ValueError(f"{what} has {length} bytes; the limit is {most}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise ValueError(f"{what} is not UTF-8 text") from None

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], what)[0]
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            raise ValueError(f"{what} has a value of type {kind}, which GGUF does not define")
        inner, count = self.numbers("IQ", what)
        if inner in _SCALARS:
            self.fits(count, struct.calcsize(f"<{_SCALARS[inner]}"), f"numbers in {what}")
            if count > _MOST_NUMBERS:
                raise ValueError(f"{what} has {count} numbers; the limit is {_MOST_NUMBERS}")
            return list(self.numbers(f"{count}{_SCALARS[inner]}", what))
        if inner != _STRING:
            raise ValueError(
                f"{what} is an array of type {inner}; only numbers and strings are supported"
            )
        self.fits(count, 8, f"strings in {what}")
        self.strings += count
        if self.strings > _MOST_STRINGS:
            raise ValueError(
                f"{what} has {count} strings; the limit for all arrays together is {_MOST_STRINGS}"
            )
        return self.texts(count, what)

    def texts(self, count: int, what: str) -> list[str]:
        """Read `count` strings. A vocabulary can have hundreds of thousands, so this loop is
        written for speed."""
        found, at, content, size = [], self.at, self.content, self.size
        length_of = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                (length,) = length_of(content, at)
                end = at + 8 + length
                if end > size:
                    raise ValueError(
                        f"a string in {what} extends {end - size} bytes past the end of the file"
                    )
                found.append(content[at + 8 : end].decode())
                at = end
        except struct.error:
            raise ValueError(f"{what} extends past the end of the file") from None
        except UnicodeDecodeError:
            raise ValueError(f"a string in {what} is not UTF-8 text") from None
        self.at = at
        return found

    def entry(self, name: str) -> tuple[tuple[int, ...], int, int]:
        """Read the shape, type and offset of a tensor."""
        (dims,) = self.numbers("I", name)
        if not 0 < dims <= _MOST_DIMS:
            raise ValueError(f"{name} has {dims} dimensions; only 1 to {_MOST_DIMS} are supported")
        shape = self.numbers(f"{dims}Q", name)
        kind, offset = self.numbers("IQ", name)
        return tuple(reversed(shape)), kind, offset

    def placed(
        self, name: str, begin: int, shape: tuple[int, ...], kind: int, offset: int
    ) -> TensorPlace:
        """Return the place of a tensor, after checking that it lies entirely inside the file."""
        name = one_line(name)
        width, nbytes = _block(kind, name)
        if min(shape) < 1:
            raise ValueError(f"{name} has shape {list(shape)}, in which a dimension is 0")
        if shape[-1] % width:
            raise ValueError(
                f"{name} has rows of {shape[-1]} values, not a multiple of the block size {width}"
            )
        stored, start = prod(shape) // width * nbytes, begin + offset
        if start + stored > self.size:
            raise ValueError(
                f"{name} extends {start + stored - self.size} bytes past the end of the file"
            )
        return TensorPlace(self.file, shape, kind, start, stored)


def block_bytes(kind: int) -> int:
    """Return the size of one block of a GGML type, in bytes."""
    return _block(kind, name_of(kind))[1]


def _block(kind: int, name: str) -> tuple[int, int]:
    """Return the number of values in one block of a GGML type, and the block's size in bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        width, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (KeyError, ValueError):
        raise ValueError(
            f"{name} has values of type {kind}, which the gguf package does not know"
        ) from None
    return width, nbytes


def name_of(kind: int) -> str:
    """Return the name of a GGML type, such as Q4_K."""
    from gguf.constants import GGMLQuantizationType

    return str(GGMLQuantizationType(kind).name)


def is_gguf(place: Path) -> bool:
    """Return True if a model's path is a GGUF file and not a folder."""
    return place.suffix == ".gguf" and not os.path.isdir(place)
