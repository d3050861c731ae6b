"""Folders of datasets with hostile files, and commands that read them."""

import json
import random
from pathlib import Path
from typing import Any

from tests.hostile.commands import Found, special
from tests.hostile.materials import Materials
from tests.hostile.values import damaged, deep, dumped, encoded, mutated, value

_ROWS = [{"prompt": "x", "category": "a"}, {"prompt": "y", "category": "b"}]
_CARD: dict[str, Any] = {
    "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "d.jsonl"}]}],
    "dataset_info": {"features": [{"name": "prompt", "dtype": "string"}]},
}
_FILES = (
    *("d.jsonl", "train.jsonl", "test.json", "train.csv", "x.txt", "train-00000-of-00002.parquet"),
    *("dataset_dict.json", "state.json", "dataset_info.json", "dataset_infos.json", "x.py"),
    *("data.zip", "metadata.csv", ".huggingface.yaml", "data/train.jsonl", "train.arrow", "x.png"),
)


def data_folder(rng: random.Random, folder: Path, materials: Materials) -> Found:
    """A folder with a file of rows, a hostile card, and maybe other hostile files."""
    where = folder / "data"
    where.mkdir()
    rows = "".join(json.dumps(row) + "\n" for row in _ROWS)
    (where / "d.jsonl").write_text(rows)
    told = []
    if rng.random() < 0.5:
        card, what = mutated(_CARD, rng, rng.choice([1, 1, 3]))
        said = encoded(f"---\n{dumped(card, rng)}\n---\n")
        if rng.random() < 0.1:
            said, what = damaged(said, rng)
        (where / "README.md").write_bytes(said)
        told.append(f"card {what}")
    for _ in range(rng.choice([0, 1, 2])):
        file = where / rng.choice(_FILES)
        file.parent.mkdir(exist_ok=True)
        if file.is_dir():
            continue
        file.unlink(missing_ok=True)
        if rng.random() < 0.3:
            what = rng.choice(["folder", "pipe", "device", "nowhere", "loop"])
            if not file.exists() and not file.is_symlink():
                special(file, what)
        else:
            content = rng.choice([b"", rows.encode(), b"{}", b"[]", encoded(dumped(value(rng)))])
            content = rng.choice([content, damaged(content, rng)[0], encoded(deep(rng).text)])
            what = repr(content[:20])
            file.write_bytes(content)
        told.append(f"{file.name} {what}")
    if rng.random() < 0.15:
        _saved(where / "saved", rng)
        where = where / "saved"
        told.append("saved")
    part = rng.choice(["", "", "", ":train", ":train[:1]", ":train[5%:]", ":x", ":train:prompt"])
    more: list[str] = rng.choice([[], ["--limit", "1"], ["--set", "data.subset=x"], ["--skip-bad"]])
    command = ["sweep-k", "--dataset", f"{where}{part}", "--dry-run", "--device", "cpu", *more]
    return ", ".join(told), command


def _saved(folder: Path, rng: random.Random) -> None:
    """A dataset as `save_to_disk` writes it, with one file damaged."""
    import datasets

    datasets.Dataset.from_list(_ROWS).save_to_disk(str(folder))
    file = rng.choice(sorted(folder.iterdir()))
    if file.suffix == ".json" and rng.random() < 0.7:
        document, _ = mutated(json.loads(file.read_text()), rng)
        file.write_bytes(encoded(dumped(document, rng)))
    else:
        file.write_bytes(damaged(file.read_bytes(), rng)[0])
