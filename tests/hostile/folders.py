"""Run folders that are damaged before a command reads them, or while one writes there.

Each function writes such a folder and returns what is hostile about it and the command line.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.commands import Found, special
from tests.hostile.materials import COMPARE, GENERATE, SWEEP, Materials
from tests.hostile.values import Raw, damaged, deep, dumped, encoded, mutated, text, value


def _command(
    run: Path, source: Path, rng: random.Random, folder: Path, materials: Materials
) -> list[str]:
    """A command that reads the copied run folder `run` of the run in `source`."""
    other = materials.root / "shard-1"
    resume = [*(COMPARE if source.name == "compare" else SWEEP), "-o", str(run), "--resume"]
    if source.name.startswith("shard"):
        resume += ["--shard", f"{source.name[-1]}/2"]
    commands = [
        ["report", str(run)],
        ["report", str(run), "-o", str(folder / "made")],
        ["merge", str(run), "-o", str(folder / "made")],
        ["merge", str(run), str(other), "-o", str(folder / "made")],
        ["generate", str(run / "recipe.yaml"), "--limit", "1", "--prompt", "x", "--device", "cpu"],
    ]
    # A comparison that is not whole would start ranks, which take seconds.
    if source.name != "generate" and (source.name != "compare" or rng.random() < 0.2):
        commands += [resume, [resume[0], "-o", str(run), "--resume"]]
    return rng.choice(commands)


def _lines(file: Path, rng: random.Random) -> str:
    """Damage lines of a .jsonl file."""
    lines = file.read_bytes().splitlines(keepends=True)
    if not lines:
        return "empty"
    at = rng.randrange(len(lines))
    how = rng.choice(
        [
            *("names", "change", "change", "change", "change", "value", "deep", "drop", "twice"),
            *("torn", "many", "shuffle", "joined", "cut", "spread", "spread"),
        ]
    )
    told = how
    if how == "change":
        record, told = mutated(json.loads(lines[at]), rng, rng.choice([1, 1, 3]))
        lines[at] = encoded(dumped(record, rng)) + b"\n"
    elif how == "names":
        told = f"names {(name := text(rng))[:20]!r}"
        for place, line in enumerate(lines):
            record = json.loads(line)
            record |= {key: name for key in ("category", "draft") if key in record}
            lines[place] = encoded(json.dumps(record)) + b"\n"
    elif how == "value":
        lines[at] = encoded(dumped(value(rng))) + b"\n"
    elif how == "deep":
        lines[at] = encoded(deep(rng).text) + b"\n"
    elif how == "drop":
        del lines[at : at + rng.choice([1, 3, 100])]
    elif how == "twice":
        lines.insert(at, lines[rng.randrange(len(lines))])
    elif how == "torn":
        lines[-1] = lines[-1][: rng.randrange(len(lines[-1]))]
    elif how == "many":
        lines = lines * 300
    elif how == "spread":
        record, count = json.loads(lines[at]), rng.choice([300, 3000])
        keys = [k for k in ("k", "batch_size", "draft", "category", "index") if k in record]
        key = rng.choice(keys or ["k"])
        told = f"spread {key} over {count}"
        for place in range(count):
            of_place = place if type(record.get(key)) is int else f"name-{place}"
            lines.append(encoded(json.dumps(record | {key: of_place})) + b"\n")
    elif how == "shuffle":
        rng.shuffle(lines)
    elif how == "joined":
        lines = [line.replace(b"\n", b"") for line in lines]
    else:
        lines = lines[:at]
    file.write_bytes(b"".join(lines))
    return told


def run_folder(rng: random.Random, folder: Path, materials: Materials) -> Found:
    """A run folder with a damaged file, and a command that reads it."""
    source = rng.choice(materials.runs)
    run = Path(shutil.copytree(source, folder / "run"))
    command = _command(run, source, rng, folder, materials)
    names = sorted(
        file.name for file in run.iterdir() if file.suffix in (".json", ".jsonl", ".yaml")
    )
    name = rng.choice([*names, rng.choice(["curve.jsonl", "replay.jsonl", "pairs.jsonl"])])
    file = run / name
    how = rng.choice(["inside"] * 6 + ["bytes", "missing", "special", "huge", "text"])
    told = how
    if not file.exists():
        how = "special" if rng.random() < 0.5 else "text"
    if how == "inside" and name.endswith(".jsonl"):
        told = _lines(file, rng)
    elif how == "inside" and name.endswith(".json"):
        document, told = mutated(json.loads(file.read_text()), rng, rng.choice([1, 1, 3]))
        file.write_bytes(encoded(dumped(document, rng)))
    elif how == "missing":
        file.unlink()
    elif how == "special":
        file.unlink(missing_ok=True)
        told = rng.choice(["folder", "pipe", "device", "nowhere", "loop"])
        special(file, told)
    elif how == "huge":
        os.truncate(file, 2**40)
    elif how == "text":
        one = rng.choice([deep(rng), Raw(""), Raw("null"), Raw("[]"), value(rng)])
        file.write_bytes(encoded(dumped(one)))
        told = f"text {str(one)[:40]!r}"
    else:
        content, told = damaged(file.read_bytes(), rng)
        file.write_bytes(content)
    if rng.random() < 0.05:
        extra = rng.choice(
            ["x.jsonl", "recipe.yaml.tmp", ".summary.json.tmp", "plots", "report.html"]
        )
        if not (run / extra).exists():
            special(run / extra, rng.choice(["pipe", "folder", "nowhere"]))
            told += f", {extra}"
    return f"{source.name} {name}: {told}", command


def _replaced(run: Path) -> None:
    shutil.copytree(run, run.with_name("copy"))
    shutil.rmtree(run)
    run.with_name("copy").rename(run)


_CHANGES: dict[str, Callable[[Path], Any]] = {
    "folder moved": lambda run: run.rename(run.with_name("other")),
    "folder removed": shutil.rmtree,
    "folder replaced": _replaced,
    "samples removed": lambda run: (run / "samples.jsonl").unlink(),
    "samples cut": lambda run: os.truncate(run / "samples.jsonl", 10),
    "samples emptied": lambda run: os.truncate(run / "samples.jsonl", 0),
    "samples replaced": lambda run: os.replace(run / "recipe.yaml", run / "samples.jsonl"),
}


def changed_meanwhile(
    rng: random.Random, folder: Path, materials: Materials
) -> tuple[str, list[str], Callable[[], None]]:
    """A run folder that is changed while a sweep or `generate` writes there.

    The third value makes the next run of this process change it.
    """
    told = rng.choice(list(_CHANGES))
    after = rng.choice([1, 2, 3, 5])
    run = folder / "run"
    command = [*rng.choice([SWEEP, GENERATE]), "-o", str(run)]

    def set_up() -> None:
        from specdec_cli.experiment.folders.run_folder import RunFolder

        append, count = RunFolder.append, 0

        def changing(self: RunFolder, name: str, *records: Any) -> None:
            nonlocal count
            append(self, name, *records)
            count += name == "samples.jsonl"
            if name == "samples.jsonl" and count == after:
                _CHANGES[told](run)

        RunFolder.append = changing  # type: ignore[method-assign]

    return f"{told} after record {after}", command, set_up
