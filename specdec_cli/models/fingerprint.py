"""A fingerprint that tells model folders of the same name apart, at the cost of a few reads."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from specdec_cli.errors import SetupError
from specdec_cli.models.weights import weight_files

_PIECE = 16 * 2**10
_PIECES = 65  # odd, so that one of them lies in the middle
_CONFIGS = ("config.json", "generation_config.json")  # the second may name the ids that end a text


def fingerprint(folder: Path, load_format: str) -> str:
    """A hash of a model's folder: the same for copies of it, another for other weights.

    It covers each weight file's name, size and header, and pieces spread evenly over the file,
    since training changes weights everywhere. It leaves out file times, which differ between
    copies, and all weight files where the weights are random. Raises `SetupError` for files that
    cannot be read.
    """
    found = hashlib.sha256()
    files = [folder / name for name in _CONFIGS]
    try:
        for file in filter(Path.is_file, files):
            content = file.read_bytes()
            found.update(f"{file.name} {len(content)}\n".encode() + content)
        for file in weight_files(folder) if load_format != "dummy" else ():
            found.update(f"{file.name} {file.stat().st_size}\n".encode())
            for piece in _pieces(file):
                found.update(piece)
    except OSError as problem:
        raise SetupError(f"cannot read {problem.filename}: {problem.strerror}") from None
    return found.hexdigest()[:16]


def _pieces(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        begin = 0
        if file.suffix == ".safetensors":
            length = int.from_bytes(stream.read(8), "little")
            begin = 8 + length if 8 + length <= size else 0  # loading reports damaged files
            stream.seek(0)
            yield stream.read(begin)
        last = max(begin, size - _PIECE)
        for piece in range(_PIECES):
            stream.seek(begin + (last - begin) * piece // (_PIECES - 1))
            yield stream.read(_PIECE)
