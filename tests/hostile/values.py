"""Hostile values, and documents and files damaged with them.

A mutation is drawn from a `random.Random`, so that its seed repeats it. Knows nothing of specdec.
"""

import copy
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DEEP = 100_000


@dataclass(frozen=True)
class Raw:
    """A text that stands in a JSON document as it is, whether or not it is JSON."""

    text: str


def number(rng: random.Random, like: Any = None) -> Any:
    """A number that few programs expect, near `like` if that is one."""
    if type(like) in (int, float) and rng.random() < 0.5:
        return rng.choice(
            [like + 1, like - 1, -like, like * 2, like // 2, like * 1000, like + 0.5, float(like)]
        )
    return rng.choice(
        [
            *(0, -1, 1, 2, 3, 7, 255, 65_537, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, 10**12),
            10**30,
            *(-(2**63), 0.5, -0.0, 1e-320, 1e12, 1e308, float("nan"), float("inf"), float("-inf")),
            *(Raw("1e999"), Raw("9" * 5000), Raw("007"), Raw("1_000"), Raw("0x10"), Raw("+1")),
        ]
    )


def text(rng: random.Random) -> str:
    """A text that few programs expect as a name."""
    return rng.choice(
        [
            *("", " ", "x", "0", "1e12", "nan", "null", "true", "auto", "-1", "=1+1", "＝1"),
            *("n" * 5000, "é" * 5000, "a\nb", "a\r\nb", "\n", "\t", "\x00", "\x1b[31m", "\u202e"),
            *("\ud800", "\udfff\ud800", "\ufeff", "\U0001f600", "../../x", "/dev/zero", "~x/y"),
            *("{{ 1 }}", "%s%n", "$(x)", "file:///x", "a/b/c", "..", ".", "/", "demo:", "demo:x"),
            *("$\\frac{", "$x$ & y_^", "<script>x</script>", "{{", "#", "%", "\\textbf{"),
            *("(a+)+$", "*", "[", "\\", "'", '"', "<unk>", "@file", "-k", "--json"),
        ]
    )


def value(rng: random.Random, like: Any = None) -> Any:
    """A value of any kind, often of the kind of `like`."""
    if isinstance(like, str) and rng.random() < 0.5:
        return text(rng)
    if type(like) in (int, float) and rng.random() < 0.6:
        return number(rng, like)
    make: Callable[[], Any] = rng.choice(
        [
            lambda: number(rng, like),
            lambda: text(rng),
            lambda: rng.choice([None, True, False]),
            lambda: rng.choice([[], [None], [[]], {}, {"": {}}, [0] * 100_000, ["a"] * 1000]),
            lambda: {"type": "x", "factor": number(rng)},
            lambda: [like, like],
            lambda: {"a": like},
            lambda: deep(rng),
            lambda: Raw(rng.choice(["NaN", "-Infinity", "", "nul", "'x'", '"\\ud800"', '"\x00"'])),
            lambda: Raw('{"a": 1, "a": 2}'),
        ]
    )
    return make()


def deep(rng: random.Random) -> Raw:
    """Nested lists or objects, deeper than any recursion goes, closed or not."""
    depth = rng.choice([500, 5000, DEEP])
    start, end = rng.choice([("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
    return Raw(start * depth + rng.choice(["", "1" + end * depth]))


def places(document: Any, most: int = 20_000) -> list[tuple[Any, Any]]:
    """Places in a document, as (container, key), from the outside in."""
    found: list[tuple[Any, Any]] = []
    inner = [document]
    for one in inner:
        keys = list(one) if isinstance(one, dict) else range(len(one))
        found += [(one, key) for key in keys]
        inner += [one[key] for key in keys if isinstance(one[key], (dict, list))]
        if len(found) > most:
            break
    return found


def mutated(document: Any, rng: random.Random, times: int = 1) -> tuple[Any, str]:
    """A copy of a document with some places changed, and what was changed."""
    document, told = copy.deepcopy(document), []
    for _ in range(times):
        if not (found := places(document)):
            break
        # A vocabulary has most places of a document; the first ones are its outside.
        holder, key = rng.choice(found[:200] if rng.random() < 0.8 else found)
        told.append(_change(holder, key, rng, found))
    return document, ", ".join(told)


def _change(holder: Any, key: Any, rng: random.Random, found: list[tuple[Any, Any]]) -> str:
    old = holder[key]
    what = rng.choices(["set", "drop", "rename", "add", "swap", "grow"], [10, 3, 1, 1, 2, 1])[0]
    if what == "drop":
        del holder[key]
    elif what == "rename" and isinstance(holder, dict):
        holder[text(rng)] = holder.pop(key)
    elif what == "add" and isinstance(holder, dict):
        holder[text(rng)] = value(rng)
    elif what == "swap":
        other, at = rng.choice(found[:200])
        holder[key] = copy.deepcopy(other[at])
    elif what == "grow" and isinstance(old, (list, str)):
        holder[key] = old * rng.choice([2, max(2, 100_000 // max(1, len(old)))])
    else:
        what, holder[key] = "set", value(rng, old)
    shown = holder.get(key) if isinstance(holder, dict) else None
    return f"{what} {str(key)[:40]!r} ({str(old)[:40]!r} -> {str(shown)[:40]!r})"


def dumped(document: Any, rng: random.Random | None = None) -> str:
    """A document as JSON, with raw texts as they are; with `rng`, maybe with a key twice."""
    raws: list[str] = []

    def held(one: Any) -> Any:
        if isinstance(one, Raw):
            raws.append(one.text)
            return f"@raw {len(raws) - 1}@"
        if isinstance(one, dict):
            return {str(key): held(inner) for key, inner in one.items()}
        return [held(inner) for inner in one] if isinstance(one, list) else one

    said = json.dumps(held(document), ensure_ascii=rng is None or rng.random() < 0.5)
    said = re.sub(r'"@raw (\d+)@"', lambda found: raws[int(found[1])], said)
    if rng is not None and said.startswith("{") and rng.random() < 0.05:
        said = said[0] + said[1:-1] + ", " + said[1:]  # every key twice
    return said


def encoded(said: str) -> bytes:
    """The bytes of a text, half pairs of surrogates too."""
    return said.encode("utf-8", "surrogatepass")


def damaged(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Bytes with a damage that disks, transfers and editors make."""
    at = rng.randrange(len(data) + 1)
    most = max(1, min(len(data), 4096))
    near = rng.randrange(most)
    changes: dict[str, Callable[[], bytes]] = {
        "nothing": lambda: b"",
        "cut": lambda: data[:at],
        "cut near the start": lambda: data[:near],
        "cut one byte": lambda: data[:-1],
        "start cut": lambda: data[near:],
        "bit": lambda: data[:near] + bytes([data[near] ^ 1 << rng.randrange(8)]) + data[near + 1 :],
        "zeros": lambda: data[:near] + bytes(64) + data[near + 64 :],
        "noise": lambda: data[:near] + rng.randbytes(64) + data[near + 64 :],
        "all noise": lambda: rng.randbytes(most),
        "twice": lambda: data + data,
        "piece twice": lambda: data[:at] + data[near:at] + data[at:],
        "appended": lambda: data + b"\x00" * 1000,
        "byte order mark": lambda: b"\xef\xbb\xbf" + data,
        "utf-16": lambda: data[:100_000].decode("latin-1").encode("utf-16"),
        "latin-1": lambda: data[:near] + b"\xe9\xff" + data[near:],
        "carriage returns": lambda: data.replace(b"\n", b"\r\n"),
        "nul": lambda: data[:near] + b"\x00" + data[near:],
        "gzip's magic": lambda: b"\x1f\x8b" + data,
    }
    if not data:
        return b"\x00", "nul"
    name = rng.choice(list(changes))
    return changes[name](), name
