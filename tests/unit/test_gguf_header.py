"""Headers of GGUF files: false ones give a message of one line and allocate little."""

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf.constants  # noqa: F401, whose import shall not count as memory of a header
import pytest

from specdec_cli.errors import ExitCode, SetupError
from specdec_cli.models.gguf.files import chosen, parts_named, read_model
from specdec_cli.models.gguf.header import read_header


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def header(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    data: int = 4096,
) -> bytes:
    """A file. counts: of tensors and keys, if others than there are."""
    told = counts or (len(tensors), len(keys))
    found = b"GGUF" + struct.pack("<IQQ", version, *told) + b"".join((*keys, *tensors))
    return found + bytes(-len(found) % 32) + bytes(data)


WORD = key(b"a", 8, text(b"word"))
HUGE = 2**62
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes"),
    "short": (b"GGUF\3\0\0\0", "has 8 bytes"),
    "other": (b"PK\3\4" + bytes(100), "does not begin with GGUF"),
    "version": (header(version=1), "version is 1"),
    "big-endian": (header(version=3 << 24), "version is 50331648"),
    "keys": (header(counts=(0, HUGE)), "keys, more than the file"),
    "more-keys": (header((WORD,), counts=(0, 9)), "the key  twice"),
    "many-keys": (header(counts=(0, 1 << 17), data=2 << 20), "131072 keys, more than"),
    "tensors": (header(counts=(2**64 - 1, 0)), "tensors, more than the file"),
    "key-length": (header((struct.pack("<Q", HUGE),)), f"a key has {HUGE} bytes"),
    "key-is-no-text": (header((key(b"\xff\xfe", 4, bytes(4)),)), "a key is not UTF-8"),
    "twice": (header((WORD, WORD)), "the key a twice"),
    "text-length": (header((key(b"a", 8, struct.pack("<Q", HUGE)),)), "a extends 46"),
    "text-is-no-text": (header((key(b"a", 8, text(b"\xff")),)), "a is not UTF-8"),
    "kind": (header((key(b"a", 77, b""),)), "a has a value of type 77"),
    "array-length": (
        header((key(b"a", 9, struct.pack("<IQ", 4, HUGE)),)),
        "numbers in a, more than the file",
    ),
    "long-array": (
        header((key(b"a", 9, struct.pack("<IQ", 0, 5 << 20)),), data=6 << 20),
        f"a has {5 << 20} numbers",
    ),
    "texts": (
        header((key(b"a", 9, struct.pack("<IQ", 8, HUGE)),)),
        "strings in a, more than the file",
    ),
    "text-in-array": (
        header((key(b"a", 9, struct.pack("<IQQ", 8, 1, HUGE)),)),
        "a string in a extends",
    ),
    "nested": (header((key(b"a", 9, struct.pack("<IQ", 9, 1)),)), "a is an array of type 9"),
    "alignment": (header((key(b"general.alignment", 4, bytes(4)),)), "general.alignment"),
    "dimensions": (header((), (text(b"t") + struct.pack("<I", 2**31),)), "t has 2147483648 dim"),
    "shape": (header((), (tensor(b"t", (2**40, 2**40)),)), "t extends"),
    "no-rows": (header((), (tensor(b"t", (4, 0)),)), "t has shape [0, 4]"),
    "type": (header((), (tensor(b"t", (4,), 999),)), "t has values of type 999"),
    "block": (header((), (tensor(b"t", (33,), 2),)), "t has rows of 33 values"),
    "offset": (header((), (tensor(b"t", (4,), 0, 2**63),)), "t extends"),
    "tensor-twice": (header((), (tensor(b"t", (4,)), tensor(b"t", (4,)))), "the tensor t twice"),
    "control-characters": (header((), (tensor(b"\x1b[31m\n", (4,), 999),)), "\\x1b[31m\\n has"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_one_line(case: str, tmp_path: Path) -> None:
    content, told = HOSTILE[case]
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(SetupError) as caught:
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
    problem = caught.value
    assert problem.code == ExitCode.ENVIRONMENT and problem.hint
    assert told in problem.message and str(file) in problem.message
    assert problem.message.isprintable()


def test_a_header_is_read(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    numbers = key(b"n", 9, struct.pack("<IQ3i", 5, 3, -1, 2, 3))
    words = key(b"w", 9, struct.pack("<IQ", 8, 2) + text(b"x") + text("é".encode()))
    found = (WORD, numbers, words, key(b"f", 6, struct.pack("<f", 0.5)))
    file.write_bytes(header(found, (tensor(b"t", (64, 3), 2, 32), tensor(b"u", (2,)))))
    read = read_header(file)
    assert read.values == {"a": "word", "n": [-1, 2, 3], "w": ["x", "é"], "f": 0.5}
    first, second = read.tensors["t"], read.tensors["u"]
    assert (first.shape, first.nbytes, second.shape) == ((3, 64), 3 * 2 * 18, (2,))
    assert first.start - second.start == 32 and second.start % 32 == 0


def test_damaged_bytes_never_end_otherwise(tmp_path: Path) -> None:
    """Every cut, and a thousand changed bytes."""
    numbers = key(b"n", 9, struct.pack("<IQ3i", 5, 3, -1, 2, 3))
    words = key(b"w", 9, struct.pack("<IQ", 8, 2) + text(b"x") + text(b"y"))
    whole = header((WORD, numbers, words), (tensor(b"t", (64, 3), 2),), data=108)
    generator = random.Random(0)
    changed = [whole[:cut] for cut in range(len(whole))]
    for _ in range(1000):
        content = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            content[generator.randrange(len(content) - 108)] = generator.randrange(256)
        changed.append(bytes(content))
    refused = 0
    for number, content in enumerate(changed):
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(content)
        try:
            read_header(file)
        except SetupError as problem:
            refused += 1
            assert problem.message.isprintable()
        file.unlink()
    assert refused > len(whole) + 300  # cuts, and most changes


# Several files.


def part(folder: Path, number: int, count: int, name: bytes, **values: int) -> Path:
    told = {"no": number, "count": count, "tensors.count": count} | values
    keys = tuple(
        key(f"split.{k}".encode(), 2 if k != "tensors.count" else 5, struct.pack(form, v))
        for (k, v), form in zip(told.items(), ("<H", "<H", "<i"), strict=True)
    )
    file = folder / f"m-{number + 1:05}-of-{count:05}.gguf"
    file.write_bytes(header(keys, (tensor(name, (4,)),)))
    return file


def test_a_split_model_is_one(tmp_path: Path) -> None:
    files = [part(tmp_path, i, 3, f"t{i}".encode()) for i in range(3)]
    for file in files:
        found = read_model(file)
        assert found.file == files[0]
        assert {name: t.file for name, t in found.tensors.items()} == {
            f"t{i}": f for i, f in enumerate(files)
        }


SPLITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: (f / "m-00002-of-00003.gguf").unlink(), "lacks 1 of the 3 files"),
    "renamed": (
        lambda f: (f / "m-00001-of-00003.gguf").rename(f / "m.gguf"),
        "its name does not say which",
    ),
    "mixed": (lambda f: part(f, 1, 3, b"t1", no=0), "is not file 2 of 3"),
    "again": (lambda f: part(f, 1, 3, b"t0"), "is not file 2 of 3"),
    "fewer": (
        lambda f: part(f, 0, 3, b"t0", **{"tensors.count": 9}),
        "have 3 tensors, but its header says 9",
    ),
}


@pytest.mark.parametrize("case", SPLITS)
def test_a_split_model_with_a_fault(case: str, tmp_path: Path) -> None:
    for i in range(3):
        part(tmp_path, i, 3, f"t{i}".encode())
    change, told = SPLITS[case]
    change(tmp_path)
    file = next(f for f in sorted(tmp_path.iterdir()) if f.name != "m-00002-of-00003.gguf")
    file = tmp_path / "m.gguf" if case == "renamed" else file
    with pytest.raises(SetupError) as caught:
        read_model(file)
    assert told in caught.value.message and caught.value.message.isprintable()


def test_names_of_parts() -> None:
    assert parts_named("a.gguf") == ["a.gguf"]
    assert parts_named("a-00002-of-00002.gguf") == [f"a-0000{i}-of-00002.gguf" for i in (1, 2)]
    names = ["b.gguf", "a-00002-of-00002.gguf", "a-00001-of-00002.gguf", "c.txt"]
    with pytest.raises(SetupError, match=r"2 GGUF files: a-00001-of-00002.gguf, b.gguf"):
        chosen("model", names, None)
    assert chosen("model", names[1:], None) == "a-00001-of-00002.gguf"
    assert chosen("model", names, "b.gguf") == "b.gguf"
    assert chosen("model", ["c.txt"], None) is None
    with pytest.raises(SetupError, match="no file d"):
        chosen("model", names, "d.gguf")
