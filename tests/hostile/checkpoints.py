"""Models with damaged weights or indexes, or with pipes and devices for files, and commands that
read them."""

import json
import random
from pathlib import Path
from typing import Any

from specdec_cli.demo import demo_path
from tests.hostile.commands import SHORT, Found, linked, model_in, run_of, special
from tests.hostile.materials import Materials
from tests.hostile.values import damaged, deep, dumped, encoded, mutated, number, text


def index(rng: random.Random, folder: Path, materials: Materials) -> Found:
    """A checkpoint of two files whose index is damaged."""
    name = "model.safetensors.index.json"
    model = linked(materials.sharded, model_in(folder, rng), name)
    values = json.loads((materials.sharded / name).read_text())
    files = sorted(set(values["weight_map"].values()))
    keys = list(values["weight_map"])
    how = rng.choice(["any", "any", "two", "files", "names", "bytes", "deep", "empty"])
    told = how
    if how == "any" or how == "two":
        values, told = mutated(values, rng, 1 if how == "any" else 5)
    elif how == "files":
        other = rng.choice(
            ["/dev/zero", "../x", "", ".", "n" * 5000, files[0], "config.json", "a\n"]
        )
        values["weight_map"] = dict.fromkeys(keys, other)
    elif how == "names":
        kept = rng.sample(keys, len(keys) // 2)
        values["weight_map"] = {text(rng) or "x": files[0], **{k: files[1] for k in kept}}
    elif how == "empty":
        values = rng.choice([{}, [], {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}])
    data = encoded(dumped(values if how != "deep" else deep(rng), rng))
    if how == "bytes":
        data, told = damaged(data, rng)
    (model / name).write_bytes(data)
    return told, run_of(model, rng)


def _safetensors(header: Any, data: bytes, rng: random.Random) -> bytes:
    said = header if isinstance(header, bytes) else encoded(dumped(header, rng))
    return len(said).to_bytes(8, "little") + said + data


_DAMAGES = (
    *(
        "length",
        "any",
        "any",
        "offsets",
        "dtype",
        "shape",
        "names",
        "cut",
        "bit",
        "deep",
        "numbers",
    ),
    *("missing", "not a file", "metadata", "pickle", "swapped"),
)


def weights(rng: random.Random, folder: Path, materials: Materials) -> Found:
    """A checkpoint whose file is damaged: its header, its offsets or its end."""
    source = rng.choice([demo_path("demo:draft"), demo_path("demo:eagle3"), materials.fp8])
    name = "model.safetensors"
    whole = (source / name).read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    names = [one for one in header if one != "__metadata__"]
    one = rng.choice(names)
    model = linked(source, model_in(folder, rng), name)
    how = rng.choice(_DAMAGES)
    told, file = f"{source.name} {how} {one}", None
    start, end = header[one]["data_offsets"]
    if how == "length":
        length = rng.choice(
            [0, 1, 2**63, 2**64 - 1, len(whole), len(whole) - 8, 100_000_001, size - 1]
        )
        file, told = length.to_bytes(8, "little") + whole[8:], f"{told} {length}"
    elif how == "any":
        header, more = mutated(header, rng, rng.choice([1, 1, 4]))
        told += more
    elif how == "offsets":
        header[one]["data_offsets"] = rng.choice(
            [
                *([end, start], [start, end + 10**12], [-1, end], [0, 0], [start, end + 1]),
                *([2**63, 2**64], [start], [start, end, end], [start, "x"], [start + 0.5, end]),
                header[names[0]]["data_offsets"],
            ]
        )
    elif how == "dtype":
        header[one]["dtype"] = rng.choice("I16 U8 F64 BOOL F8_E4M3 F4 C64 X F16 I64".split())
    elif how == "shape":
        shape = header[one]["shape"]
        header[one]["shape"] = rng.choice(
            [
                *(shape[::-1], [*shape, 1], [1, *shape], [0], [], [2**32, 2**32], [-1]),
                *([n // 2 for n in shape], [sum(shape)], [number(rng)], ["x"], [shape]),
            ]
        )
    elif how == "names":
        header[rng.choice(["n" * 5000, "a\nb", "\ud800", "", text(rng)])] = header.pop(one)
    elif how == "missing":
        del header[one]
    elif how == "swapped":
        other = rng.choice(names)
        header[one], header[other] = header[other], header[one]
    elif how == "metadata":
        header["__metadata__"] = rng.choice(
            [3, [], {"a": 3}, {"format": "tf"}, {"n" * 5000: "x"}, None]
        )
    elif how == "deep":
        header = encoded(deep(rng).text)
    elif how == "cut":
        file = whole[: rng.choice([0, 7, 8, 9, size, 8 + size, len(whole) // 2, len(whole) - 1])]
    elif how == "bit":
        file, told = damaged(whole, rng)
    elif how == "numbers":
        filled = rng.choice([b"\xff", b"\x7f\x80"[::-1], b"\x00"]) * len(data)
        file = _safetensors(header, filled[: len(data)], rng)
    elif how == "pickle":
        name = "pytorch_model.bin"
        file = rng.choice(
            [b"", b"\x80\x04.", whole, b"PK\x03\x04" + bytes(99), b"cos\nsystem\n(S'x'\ntR."]
        )
    if how == "not a file":
        what = rng.choice(["folder", "pipe", "device", "nowhere", "loop"])
        special(model / name, what)
        told = what
    else:
        (model / name).write_bytes(_safetensors(header, data, rng) if file is None else file)
    command = run_of(model, rng, is_alone=source == materials.fp8)
    if source.name == "eagle3":
        command = ["generate", "demo", "--draft", str(model), "-k", "2", "--prompt", "x", *SHORT]
    elif rng.random() < 0.5:
        command = ["generate", "--target", str(model), "-k", "0", "--prompt", "x", *SHORT]
    return told, [*command, *(["--allow-pickle"] if how == "pickle" else [])]


def files(rng: random.Random, folder: Path, materials: Materials) -> Found:
    """A model's folder with pipes, devices, links and folders in place of its files."""
    source = rng.choice([demo_path("demo:draft"), demo_path("demo:eagle3"), materials.sharded])
    name = rng.choice(sorted(file.name for file in source.iterdir() if file.name != "README.md"))
    more = [
        "added_tokens.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "x.py",
        "vocab.txt",
    ]
    more += ["adapter_config.json", "preprocessor_config.json", "model.safetensors.index.json"]
    name = rng.choice([name, name, rng.choice(more)])
    model = linked(source, model_in(folder, rng), name)
    what = rng.choice(["folder", "pipe", "device", "nowhere", "loop", "huge"])
    if what == "huge":
        with (model / name).open("wb") as file:
            file.truncate(2**40)
    else:
        special(model / name, what)
    if source.name == "eagle3":
        command = ["generate", "demo", "--draft", str(model), "-k", "2", "--prompt", "x", *SHORT]
    else:
        command = run_of(model, rng)
    return f"{source.name} {name} is a {what}", command
