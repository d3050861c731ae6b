"""Choose among the GGUF files of a folder, and read models that are split over several files."""

import re
from collections.abc import Iterable
from pathlib import Path

from specdec_cli.errors import SetupError
from specdec_cli.models.gguf.header import Header, TensorPlace, read_header
from specdec_cli.text import one_line

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_SHOWN = 20


def first_parts(names: Iterable[str]) -> list[str]:
    """Return one file name per model, sorted. For a split model this is the name of its first
    file."""
    found = (name for name in names if name.endswith(".gguf"))
    return sorted(n for n in found if not (m := _PART.fullmatch(n)) or int(m[2]) == 1)


def chosen(name: str, names: Iterable[str], file: str | None) -> str | None:
    """Return the name of the GGUF file to use: `file` if it is given, otherwise the only model in
    `names`, or None if there is none. name: the model's name, for messages. Raises `SetupError` if
    `file` is not among `names`, or if it is None and there are several models."""
    all_names = list(names)
    models = first_parts(all_names)
    told = ", ".join(one_line(n) for n in models[:_MOST_SHOWN])
    told += f" and {len(models) - _MOST_SHOWN} more" if len(models) > _MOST_SHOWN else ""
    if file is not None:
        if file not in all_names:
            has = f"there are {told}" if models else "there is no .gguf file"
            raise SetupError(f"the model {name} has no file {file}", has)
        return file
    if len(models) > 1:
        raise SetupError(
            f"the model {name} has {len(models)} GGUF files: {told}",
            f"choose one with the key `file` next to `model`, such as file: {one_line(models[0])}",
        )
    return models[0] if models else None


def parts_named(name: str) -> list[str]:
    """Return the names of all files of a model, given the name of one of them."""
    match = _PART.fullmatch(name)
    if match is None or not 1 < int(match[3]) <= 9999:
        return [name]
    count = int(match[3])
    return [f"{match[1]}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]


def read_model(file: Path) -> Header:
    """Read the header of a model, with the tensors of all its files. Raises `SetupError` if a file
    is damaged or missing."""
    header = read_header(file)
    count = header.values.get("split.count", 1)
    if type(count) is not int or count < 2:
        return header
    names = parts_named(file.name)
    if len(names) != count:
        raise SetupError(
            f"{file} is one of {count} files of a split model, but its name does not say which",
            f"such files are called NAME-00001-of-{count:05}.gguf",
        )
    files = [file.with_name(name) for name in names]
    if missing := [f for f in files if not f.is_file()]:
        raise SetupError(
            f"{file.parent} lacks {len(missing)} of the {count} files of a split model; the first "
            f"missing one is {one_line(missing[0].name)}",
            "download the model again",
        )
    return _joined([read_header(f) for f in files])


def _joined(headers: list[Header]) -> Header:
    tensors: dict[str, TensorPlace] = {}
    for i, header in enumerate(headers):
        place = header.values.get("split.no"), header.values.get("split.count")
        if place != (i, len(headers)) or tensors.keys() & header.tensors.keys():
            raise SetupError(
                f"{header.file} is not file {i + 1} of {len(headers)} of this split model",
                "files of several models are mixed; download the model again",
            )
        tensors |= header.tensors
    first = headers[0]
    wanted = first.values.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise SetupError(
            f"the files of the split model {first.file} have {len(tensors)} tensors, but its "
            f"header says {wanted}",
            "files of several models are mixed; download the model again",
        )
    return Header(first.file, first.values, tensors, first.size)
