"""Hostile recipes, data files and options, and commands that read them.

Each function writes such files and returns what is hostile about them and the command line.
"""

import io
import json
import os
import random
from pathlib import Path
from typing import Any

import yaml

from specdec_cli.recipe.resolve import bundled_recipes
from tests.hostile.commands import Found, special
from tests.hostile.materials import Materials
from tests.hostile.values import DEEP, damaged, deep, dumped, encoded, mutated, number, text, value

_RECIPE: dict[str, Any] = {
    "target": {"model": "demo:target", "tensor_parallel_size": 1, "dtype": "auto"},
    "draft": {"model": "demo:draft", "tensor_parallel_size": 1, "share": []},
    "speculation": {
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "acceptance": "rejection",
    },
    "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 3, "stop": ["zz"]},
    # The demo model has room for 2048 tokens. A sweep that writes as many at every point, since the
    # recipe's limit is too high, is a minute of honest work, and no hang.
    "cache": {"block_size": 16, "num_blocks": None, "max_model_len": 256, "cpu_bytes": None},
    "run": {"batch_size": 1, "device": "cpu", "seed": 0, "warmup": 0, "repeats": 1},
    "data": {"path": "demo:prompts", "limit": 1, "chat": "auto"},
}
# A recipe may ask for days of repeats, and that is no hang.
_ONCE = ["--set", "run.repeats=1", "--set", "run.warmup=0"]
_ENDS: dict[str, list[Any]] = {
    "sampling.temperature": [1e-300, 1e308, 0.7],
    "sampling.top_p": [1e-300, 1.0000001, 0],
    "sampling.top_k": [1, 10**9, -1],
    "sampling.max_new_tokens": [1, 10**9, 2**31 - 1],
    "sampling.stop": [[""], ["x"] * 10_000, ["n" * 10**6], "x", ["\ud800"]],
    "cache.block_size": [1, 2**30, 10**9, 3],
    "cache.num_blocks": [1, 2, 3, 10**9, 2**31 - 1],
    "cache.max_model_len": [1, 2, 3, 10**9],
    "cache.cpu_bytes": [1, "1KiB", "1e9GiB", 2**62, "8GiB"],
    "cache.gpu_memory_utilization": [0, 1e-9, 1.1],
    "run.batch_size": [1000, 2**16, 2**16 + 1, 10**9],
    "run.seed": [2**63 - 1, 2**64, -1, 2**31],
    "run.repeats": [0, 2**31, -1],
    "run.warmup": [2**31, -1],
    "run.prefill_chunk": [1, 2**31 - 1],
    "run.timeout_s": [0.001, 1e308, 1e-9],
    "run.device": ["cuda:99", "meta", "cpu:1", "mps", "x", "cuda"],
    "speculation.num_speculative_tokens": [1024, 10**6, 300],
    "speculation.method": ["eagle3", "ngram", "none", "x"],
    "speculation.acceptance": ["synthetic", "block", "typical", "x"],
    "speculation.ngram_max": [10**9, 1, 0],
    "data.limit": [2**31 - 1, 0],
    "data.path": ["/dev/zero", "/proc/self/mem", ".", "x.csv", "demo:nope", "/dev/stdin"],
    "data.split": ["train[:10]", "[9999:]", "x[::", "train[10**9:]"],
    "data.column": ["x", "prompt", ""],
    "data.subset": ["x"],
    "draft.share": [["embeddings"], ["lm_head"], ["embeddings", "lm_head"], ["x"]],
    "target.load_format": ["dummy", "x"],
    "target.revision": ["x", "../.."],
    "target.model": ["demo:draft", "demo:eagle3", "/", "/dev/null", "a/b", "~", "."],
    "draft.model": ["demo:target", "demo:eagle3", "ngram", "/dev"],
}


def _yamls(rng: random.Random) -> str:
    """A text that YAML reads as something unlike a recipe, or slowly."""
    good = "target: {model: demo:target}\n"
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)
    )
    return rng.choice(
        [
            bomb + good,
            f"{good}data: &x\n  path: *x\n",
            f"{good}run: !!python/object/apply:os.system [x]\n",
            f"{good}run: !x {{seed: 1}}\n",
            f"{good}{good}",
            f"{good}---\n{good}",
            "---\n...\n",
            f"{good}? [a, b]\n: c\n",
            f"{good}<<: {{run: {{seed: 1}}}}\n",
            f"{good}<<: [1, 2]\n",
            f"{good}run: {{seed: 0o17, repeats: 1:30}}\n",
            f"{good}run: {{seed: 2026-11-25}}\n",
            f"{good}run: {{seed: .nan}}\n",
            f"{good}run: {{seed: =}}\n",
            f"{good}run:\n\tseed: 1\n",
            f"{good}x: |\n" + " y\n" * 100_000,
            f"{good}x: " + '"' + "\\x41" * 100_000 + '"\n',
            f"{good}run: {{seed: {'1' * 100_000}}}\n",
            f"{good}run: {{seed: {'1_' * 10_000}1}}\n",
            f"{good}run: {{seed: {'1:' * 10_000}1}}\n",
            f"{good}sampling: {{temperature: {'1' * 50_000}.e}}\n",
            "- " * DEEP,
            "{" * DEEP,
            "".join(" " * i + "a:\n" for i in range(2000)),
            "? " * 5000,
            "&a " * 5000,
            "!" * 5000 + "\n",
            "%YAML 9.9\n---\n" + good,
            "%TAG ! tag:x\n" * 1000 + "---\n" + good,
            "# x\n" * 100_000 + good,
            "\x00" + good,
            "\ufeff" + good,
            "x" * 10**6,
            '"' + "x" * 10**6,
            "",
            "null",
            "3",
        ]
    )


def recipe(rng: random.Random, folder: Path, materials: Materials) -> Found:
    """A recipe with hostile values, keys or syntax."""
    how = rng.choice(["ends", "ends", "any", "any", "two", "text", "bytes", "json", "file"])
    values = json.loads(json.dumps(_RECIPE))
    told, name = how, "r.yaml"
    if how == "ends":
        path = rng.choice(list(_ENDS))
        section, key = path.split(".")
        values[section][key] = rng.choice(_ENDS[path])
        told = f"{path}: {str(values[section][key])[:60]}"
        data = encoded(dumped(values))
    elif how == "text":
        said = _yamls(rng)
        told, data = f"text {said[:60]!r}", encoded(said)
    elif how == "bytes":
        whole = rng.choice([one.path for one in bundled_recipes()]).read_bytes()
        data, told = damaged(whole, rng)
    elif how == "file":
        told = rng.choice(["folder", "pipe", "device", "nowhere", "loop"])
        special(folder / name, told)
        data = b""
    else:
        values, told = mutated(values, rng, 2 if how == "two" else 1)
        name = "r.json" if how == "json" else name
        data = encoded(dumped(values, rng))
        if how == "two":
            try:
                data = yaml.safe_dump(json.loads(data)).encode("utf-8", "surrogatepass")
            except (ValueError, RecursionError, yaml.YAMLError):
                pass
    if how != "file":
        (folder / name).write_bytes(data)
    command = rng.choice(
        [
            ["generate", name],
            ["generate", name, "--prompt", "x"],
            ["recipe", "show", name],
            ["recipe", "validate", name],
            ["sweep-k", name, "--k", "0-2", "--dry-run"],
            ["sweep-k", name, "--k", "0,2", "-o", "run", *_ONCE],
            ["compare-tp", name, "--dry-run"],
            ["profile-blocks", name, "--batch-size", "2"],
            ["profile-blocks", name, "--estimate"],
        ]
    )
    return told, command


_ROWS: list[dict[str, Any]] = [
    {"prompt": "def add(a, b):", "category": "x"},
    {"messages": [{"role": "user", "content": "hi"}], "category": "x"},
    {"prompt_token_ids": [5, 6, 7]},
    {"turns": ["one", "two"], "question_id": 3, "category": "x"},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "x"}]},
    {"instruction": "x", "input": "y", "output": "z"},
    {"text": "x"},
    {"question": "x", "answer": "y"},
]


def _table(rng: random.Random) -> tuple[str, str]:
    """A hostile text for a .csv or .tsv file, and what is hostile."""
    columns = rng.choice([3, 100_000])
    made = {
        "field": "prompt\n" + "x" * 300_000 + "\n",
        "open quote": 'prompt,category\n"x' + ",y\n" * 50_000,
        "columns": ",".join(f"c{i}" for i in range(columns))
        + "\n"
        + ",".join("x" * columns)
        + "\n",
        "same columns": "prompt,prompt\nx,y\n",
        "short rows": "prompt,category\nx\n\ny,z,w\n",
        "no header": "x\ny\n",
        "nul": "prompt\nx\x00y\n",
        "formulas": "prompt,category\n=1+1,＝1\n@x,-3\n",
        "quotes": "prompt\n" + '"' * 10_001 + "\n",
        "empty": "prompt\n" + "\n" * 10_000,
        "names": f"prompt,{text(rng)},category\nx,y,{text(rng)}\n",
        "rows": "prompt\n" + "x\n" * 50_000,
    }
    name = rng.choice(list(made))
    return made[name], name


def data(rng: random.Random, folder: Path, materials: Materials) -> Found:
    """A file of prompts with hostile rows, syntax or bytes."""
    rows = [rng.choice(_ROWS) for _ in range(rng.choice([1, 3]))]
    ending = rng.choice(["jsonl", "jsonl", "json", "csv", "tsv", "txt", "parquet"])
    file, told = folder / f"p.{ending}", ending
    if ending in ("csv", "tsv"):
        said, more = _table(rng)
        told += f" {more}"
        content = encoded(said.replace(",", "\t") if ending == "tsv" else said)
    elif ending == "txt":
        content = encoded(
            rng.choice(["\n" * 10**6, "x" * 10**6, "x\r\ny\rz", text(rng), "a\n" * 10**5])
        )
    elif ending == "parquet":
        content, more = _parquet(rng, rows)
        told += f" {more}"
    else:
        how = rng.choice(["any", "any", "value", "deep", "many keys", "ids", "messages"])
        told += f" {how}"
        found: Any = rows
        if how == "any":
            found, more = mutated(rows, rng, rng.choice([1, 2]))
            told += f" {more}"
        elif how == "value":
            found = [*rows, value(rng)]
        elif how == "deep":
            found = [*rows, deep(rng)]
        elif how == "many keys":
            found = [{f"k{i}": 1 for i in range(50_000)} | rows[0]]
        elif how == "ids":
            found = [{"prompt_token_ids": rng.choice([[], [number(rng)], [5] * 10**6, "x", [[5]]])}]
        else:
            role = rng.choice(["user", "system", "x", 3, None])
            content_of = rng.choice(["x", None, 3, [{"type": "text", "text": "x"}], "", "\ud800"])
            found = [
                {"messages": rng.choice([[], "x", [{}], [{"role": role, "content": content_of}]])}
            ]
        lines = found if ending == "jsonl" and isinstance(found, list) else None
        said = "".join(dumped(row, rng) + "\n" for row in lines) if lines else dumped(found, rng)
        content = encoded(said)
    if rng.random() < 0.25:
        content, more = damaged(content, rng)
        told += f", {more}"
    if rng.random() < 0.06:
        told = rng.choice(["folder", "pipe", "device", "nowhere", "loop"])
        special(file, told)
    else:
        file.write_bytes(content)
    short = ["--max-new-tokens", "2", "--device", "cpu", "-k", "2"]
    more_options = rng.choice(
        [[], [], ["--skip-bad"], ["--limit", "2"], ["--chat"], ["--system", "x"]]
    )
    if rng.random() < 0.5:
        limit = [] if "--limit" in more_options else ["--limit", "3"]
        return told, ["generate", "--prompt-file", file.name, *short, *more_options, *limit]
    named = rng.choice([file.name, f"{file.name}:train[:2]", f"{file.name}:train:prompt"])
    return told, ["sweep-k", "--dataset", named, "--dry-run", "--device", "cpu", *more_options]


def _parquet(rng: random.Random, rows: list[dict[str, Any]]) -> tuple[bytes, str]:
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, list[Any]] = {
        "names": [text(rng).replace("\ud800", "").replace("\udfff", ""), "x"],
        "bytes": [b"\xff\xfe", b"x"],
        "numbers": [1, 2],
        "nested": [[{"role": "user", "content": "x"}], None],
        "none": [None, None],
        "long": ["x" * 10**6, "y"],
    }
    how = rng.choice(list(columns))
    name = rng.choice(["prompt", "messages", "text", "x", "prompt_token_ids"])
    table = pyarrow.table({name: columns[how], "category": ["a", "b"]})
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    content = file.getvalue()
    if rng.random() < 0.5:
        content, more = damaged(content, rng)
        how = f"{how}, {more}"
    return content, f"{name} of {how}"


_OPTIONS: dict[str, list[str]] = {
    "--k": [
        "0-1024",
        "1024",
        "0-",
        "-1",
        "9999999999",
        "0,0,0",
        "",
        "1,,2",
        "٣",
        "0-8-9",
        " 1 ",
        "1e3",
    ],
    "-k": ["1024", "-1", "x", "99999999999999999999", "1.5", "", "nan", "1025"],
    "--limit": ["0", "-1", "2147483648", "1e3", ""],
    "--shard": ["0/0", "1/1", "-1/2", "999999/999999", "x", "0/2/3", "", "１/２"],
    "--batch-size": ["0", "999999", "1,1", "x", "1e3", ""],
    "--temperature": ["nan", "inf", "-1", "1e308", "1e-320", ""],
    "--top-p": ["0", "nan", "2", "-0.0"],
    "--top-k": ["-1", "99999999999", "x"],
    "--seed": ["-1", "18446744073709551616", "x", "0x10"],
    "--num-blocks": ["0", "1", "2", "2147483647", "-1"],
    "--block-size": ["0", "1", "2147483647", "3"],
    "--max-new-tokens": ["0", "2147483647", "-1", "x"],
    "--target-tp": ["0", "65", "3", "-1", "x", "1,2"],
    "--draft-tp": ["0", "2", "64", "x"],
    "--dtype": ["x", "int8", "float16", "", "FLOAT32"],
    "--device": ["x", "cuda", "cuda:-1", "cuda:99", "meta", "cpu:0", ""],
    "--target": ["", "/", "x/y", "/dev/null", "demo:x", "n" * 5000, "a\nb", "~x/y", "\udcff", "."],
    "--draft": [
        "",
        "/",
        "ngram",
        "none",
        "demo:eagle3",
        "demo:target",
        "n" * 300,
        "\udcff",
        "a//b",
    ],
    "--prompt": ["", " ", "\n", "\udcff", "x" * 100_000, "\x1b[31m", "-", "@x", "🙂" * 3000],
    "--prompt-file": ["", "-", "/dev/null", ".", "/", "n" * 5000, "x\ny", "\udcff", "x.csv"],
    "--dataset": [
        "",
        ":",
        "::",
        "x:y:z:w",
        "/dev/zero",
        "demo:prompts[:",
        "demo:prompts:train",
        "\udcff",
    ],
    "--set": [
        *("", "=", "x", "run.seed", "run=3", "run.seed=[", "data=null", "target=null", "draft=3"),
        *("run.seed={a: " + "[" * 5000, "x." * 5000 + "y=1", "run.seed=" + "9" * 5000, "a.b.c=1"),
        *("run={}", "sampling.stop=[1]", "draft.model.x=1", ".=1", "run.=1", "run.seed=!!x 1"),
    ],
    "--system": ["", "\udcff", "x" * 100_000],
    "--synthetic-acceptance-rates": [
        "",
        "2",
        "nan",
        "0.5,0.9",
        "-1",
        "[0.5",
        "1," * 5000,
        "1e-400",
    ],
    "--synthetic-acceptance-length": ["0", "nan", "1e308", "-1", "1", "1.0000001"],
    "-o": [
        "",
        "/dev/null",
        "/proc/x",
        "n" * 5000,
        "a\nb",
        "\udcff",
        "x/../y",
        "r.html",
        "x.csv",
        "a b",
    ],
    "--format": ["", "x", "html,x", ",", "csv,csv"],
    "--plugin": ["", "x.py", "/dev/null", "/dev/zero", ".", "n" * 5000],
    "--nope": ["x"],
    "--memory": ["24", "x"],
    "--device-memory": ["24", "0", "-1GiB", "1e999", "x", "9" * 400, "nanGiB"],
    "--batches": ["0", "-1", "99999999999999999999"],
}
_COMMANDS: dict[str, list[str]] = {
    "generate": ["generate", "demo", "--prompt", "x", "--max-new-tokens", "2"],
    "sweep-k": ["sweep-k", "demo", "--dry-run"],
    "sweep": [
        "sweep-k",
        "--k",
        "0,1",
        "--limit",
        "1",
        "--max-new-tokens",
        "2",
        "--set",
        "run.repeats=1",
    ],
    "compare-tp": ["compare-tp", "demo", "--dry-run"],
    "profile-blocks": ["profile-blocks", "demo"],
    "estimate": ["profile-blocks", "demo", "--estimate"],
    "report": ["report"],
    "merge": ["merge"],
    "recipe": ["recipe"],
}


def options(rng: random.Random, folder: Path, materials: Materials) -> Found:
    """A command line with hostile options and arguments."""
    command = list(_COMMANDS[rng.choice(list(_COMMANDS))])
    told = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        name = rng.choice(list(_OPTIONS))
        given = rng.choice([*_OPTIONS[name], rng.choice(_OPTIONS[name])])
        if rng.random() < 0.1 and name != "-o":  # nothing is written outside the case's folder
            given = os.fsdecode(encoded(text(rng))).replace("\x00", "")
        told.append(f"{name} {given[:40]!r}")
        command += [name, given] if rng.random() < 0.9 else [f"{name}={given}"]
    if rng.random() < 0.15:
        command.append(os.fsdecode(encoded(text(rng))).replace("\x00", ""))
    (folder / "x.csv").write_text("prompt\nx\n")
    return ", ".join(told), command
