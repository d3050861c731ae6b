"""Fingerprints that distinguish models of the same name. They are fast to compute, because only a
sample of the weights is read."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from specdec_cli.errors import SetupError
from specdec_cli.models.gguf.files import read_model
from specdec_cli.models.gguf.header import is_gguf, read_header
from specdec_cli.models.weights import weight_files

_PIECE = 16 * 2**10
_PIECES = 65  # odd, so that one piece lies in the middle
_CONFIGS = ("config.json", "generation_config.json")  # the second may set EOS ids


def fingerprint(place: Path, load_format: str) -> str:
    """Return a hash of a model's folder or GGUF file: the same for copies of a model, and different
    for different weights.

    The hash covers the config files, the header of each weight file and evenly spaced pieces of the
    rest. The pieces suffice, because training changes weights everywhere. Except for GGUF, the hash
    also covers the files' names. With dummy weights the weights are left out. Raises `SetupError`
    for files that cannot be read.
    """
    found = hashlib.sha256()
    try:
        for piece in _of_gguf(place, load_format) if is_gguf(place) else _of(place, load_format):
            found.update(piece)
    except OSError as problem:
        raise SetupError(f"cannot read {problem.filename}: {problem.strerror}") from None
    return found.hexdigest()[:16]


def _of(folder: Path, load_format: str) -> Iterator[bytes]:
    for file in filter(Path.is_file, [folder / name for name in _CONFIGS]):
        content = file.read_bytes()
        yield f"{file.name} {len(content)}\n".encode() + content
    for file in weight_files(folder) if load_format != "dummy" else ():
        yield f"{file.name} {file.stat().st_size}\n".encode()
        yield from _pieces(file, _header_bytes(file) if file.suffix == ".safetensors" else 0)


def _of_gguf(file: Path, load_format: str) -> Iterator[bytes]:
    header = read_model(file)
    files = dict.fromkeys([header.file, *(t.file for t in header.tensors.values())])
    for part in files:
        size = read_header(part).size
        if load_format == "dummy":
            with part.open("rb") as stream:
                yield stream.read(size)
        else:
            yield f"{part.stat().st_size}\n".encode()
            yield from _pieces(part, size)


def _header_bytes(file: Path) -> int:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
    return 8 + length if 8 + length <= file.stat().st_size else 0  # damaged; loading reports it


def _pieces(file: Path, begin: int) -> Iterator[bytes]:
    """Yield the first `begin` bytes of a file, and then evenly spaced pieces of the rest."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if begin:
            yield stream.read(begin)
        last = max(begin, size - _PIECE)
        for piece in range(_PIECES):
            stream.seek(begin + (last - begin) * piece // (_PIECES - 1))
            yield stream.read(_PIECE)
