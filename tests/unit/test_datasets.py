"""`load_prompts`: every format, split, column and limit; malformed lines are elsewhere too."""

import gzip
import json
import logging
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.errors import SetupError, UsageError
from specdec_cli.prompts import Prompt, load_prompts
from specdec_cli.recipe.sections import DataSection
from tests.unit.test_prompts import texts

RECORDS = [
    {"prompt": "one, two", "category": "math"},
    {"prompt": 'said "hi"\nand left', "category": "text"},
    {"prompt": "# über\t🙂", "category": None},
]


def load(path: Path | str, **keys: Any) -> list[Prompt]:
    skip_bad = keys.pop("skip_bad", False)
    return load_prompts(DataSection(path=str(path), **keys), skip_bad=skip_bad).prompts


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8", newline="")
    return path


def spec_bench(folder: Path, count: int = 4) -> Path:
    lines = [
        {"question_id": 81 + i, "category": ["writing", "qa"][i % 2], "turns": [f"q{i}", "later"]}
        for i in range(count)
    ]
    return write(folder / "question.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))


def table(folder: Path, extension: str) -> Path:
    path = folder / f"p.{extension}"
    if extension == "jsonl":
        return write(path, "".join(json.dumps(record) + "\n" for record in RECORDS))
    if extension == "json":
        return write(path, json.dumps(RECORDS, indent=2))
    if extension == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
        return path
    import csv

    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="," if extension == "csv" else "\t")
        writer.writerow(["prompt", "category"])
        writer.writerows([record["prompt"], record["category"]] for record in RECORDS)
    return path


@pytest.mark.parametrize("extension", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_formats_hold_the_same(extension: str, tmp_path: Path) -> None:
    path = table(tmp_path, extension)
    prompts = load(path)
    assert texts(prompts) == [record["prompt"] for record in RECORDS]
    assert [prompt.category or None for prompt in prompts] == ["math", "text", None]
    assert texts(load(path, limit=2)) == texts(prompts)[:2]
    assert texts(load(path, split="train[1:]")) == texts(prompts)[1:]
    assert texts(load(path, column="category", limit=2)) == ["math", "text"]


def test_places(tmp_path: Path) -> None:
    def ends(extension: str) -> list[str]:
        path = table(tmp_path, extension)
        return [prompt.where.removeprefix(str(path)) for prompt in load(path)]

    assert ends("jsonl") == [":1", ":2", ":3"]
    assert ends("json") == [":2", ":6", ":10"]
    assert ends("csv") == [":2", ":3", ":5"]  # the second one runs over two lines
    assert ends("parquet") == [": row 1", ": row 2", ": row 3"]


def test_spec_bench(tmp_path: Path) -> None:
    prompts = load(spec_bench(tmp_path))
    assert texts(prompts) == ["q0", "q1", "q2", "q3"]
    assert [prompt.category for prompt in prompts] == ["writing", "qa", "writing", "qa"]
    assert texts(load(tmp_path / "question.jsonl", column="turns", limit=1)) == ["q0"]


def test_demo_prompts() -> None:
    assert len(load("demo:prompts")) == 200
    few = load("demo:prompts", split="train[5:8]")
    assert [p.text for p in few] == [p.text for p in load("demo:prompts")[5:8]]
    with pytest.raises(UsageError, match="no bundled prompts demo:nothing"):
        load("demo:nothing")


@pytest.mark.parametrize("extension", ["jsonl", "json"])
def test_sniffed_in_order(extension: str, tmp_path: Path) -> None:
    message = {"role": "user", "content": "f"}
    records: list[dict[str, object]] = [
        {"messages": [message], "turns": ["e"], "text": "d", "instruction": "c", "question": "b"},
        {"messages": [message], "turns": ["e"], "text": "d", "instruction": "c"},
        {"messages": [message], "turns": ["e"], "text": "d"},
        {"messages": [message], "turns": ["e", "g"]},
        {"messages": [message]},
    ]
    records = [{"prompt": "a", **records[0]}, *records]
    content = json.dumps(records)
    if extension == "jsonl":
        content = "\n".join(map(json.dumps, records))
    prompts = load(write(tmp_path / f"p.{extension}", content))
    assert texts(prompts) == ["a", "b", "c", "d", "e", None]
    assert prompts[5].messages == (message,)


def test_a_named_column_says_by_itself_what_it_is(tmp_path: Path) -> None:
    user = {"role": "user", "content": "m"}
    rows = [{"x": "text"}, {"x": ["turn", "later"]}, {"x": [user]}, {"x": [3, 4]}]
    prompts = load(write(tmp_path / "p.json", json.dumps(rows)), column="x")
    assert texts(prompts) == ["text", "turn", None, None]
    assert prompts[2].messages == (user,) and prompts[3].token_ids == (3, 4)


def test_json_of_texts_and_of_lines(tmp_path: Path) -> None:
    assert texts(load(write(tmp_path / "a.json", '\ufeff ["a",\n "b"]'))) == ["a", "b"]
    assert texts(load(write(tmp_path / "b.json", '{"prompt": "a"}\n{"text": "b"}\n'))) == ["a", "b"]


def test_csv_kinds(tmp_path: Path) -> None:
    quoted = '\ufeffid,question\r\n1,"a, ""b""\r\nc"\r\n\r\n2,  d \r\n'
    assert texts(load(write(tmp_path / "a.csv", quoted))) == ['a, "b"\r\nc', "  d "]
    # In a table of text, numbers stay text; no types are guessed.
    assert texts(load(write(tmp_path / "b.csv", "prompt\n007\nNA\n"))) == ["007", "NA"]
    long = "x" * 200_000
    assert texts(load(write(tmp_path / "c.csv", f"prompt\n{long}\n"))) == [long]


@pytest.mark.parametrize(
    ("split", "rows"),
    [
        ("train", range(10)),
        ("train[:3]", range(3)),
        ("train[2:5]", range(2, 5)),
        ("train[8:]", range(8, 10)),
        ("train[:25%]", range(2)),
        ("train[50%:]", range(5, 10)),
        ("train[25%:75%]", range(2, 8)),
    ],
)
def test_slices_are_those_of_datasets(split: str, rows: range, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", "".join(f'{{"prompt": "{i}"}}\n' for i in range(10)))
    found = texts(load(path, split=split))
    assert found == [str(i) for i in rows]
    datasets = pytest.importorskip("datasets")
    rules = datasets.ReadInstruction.from_spec(split).to_absolute({"train": 10})
    assert [i for r in rules for i in range(r.from_, r.to)] == list(rows)


BAD: dict[str, tuple[str, str]] = {
    "no-column.csv": ("a,b\n1,2\n", ": none of the columns prompt, question, instruction"),
    "semicolons.csv": ("prompt;b\n1;2\n", "it has prompt;b"),
    "cells.csv": ("prompt,b\na,b\na\n", ":3: has 1 cells; the header names 2 columns"),
    "more-cells.csv": ("prompt\na\nb,c\n", ":3: has 2 cells; the header names 1 columns"),
    "quote.csv": ('prompt\na\n"b\nc\n', ":3: a quote in this row is never closed"),
    "inner-quote.csv": ('prompt\n"a" b\n', ":2: not a row of the table"),
    "blank.csv": ("prompt,x\na,1\n ,2\n", ":3: blank prompt"),
    "empty.csv": ("", ":1: no header line"),
    "header.csv": ("prompt\n", ": no prompts in it"),
    "twice.csv": ("prompt,prompt\na,b\n", ":1: two columns are called 'prompt'"),
    "nul.csv": ("prompt\na\0b\n", ":2: holds a NUL byte"),
    "utf-16.csv": ("p\0r\0o\0m\0p\0t\0\n\0a\0", ":1: holds a NUL byte: a binary file, or UTF-16?"),
    "turns.csv": ("turns\n[INST] a\n", ":2: turns is not JSON"),
    "number-in-turns.csv": ('turns\n"[1, ""a""]"\n', ":2: turns should be text, turns"),
    "body.csv": ("title,body\na,b\n", ": none of the columns prompt, question, instruction"),
    "number.json": ('["a",\n5]', ":2: should be a JSON object"),
    "mixed.json": ('[{"prompt": "a"},\n\n{"prompt": 5}]', ":3: prompt should be text"),
    "null.json": ('[{"prompt": "a"}, null]', ":1: should be a JSON object"),
    "twice.json": ('[{"prompt": "a"},\n{"prompt": "b", "prompt": "c"}]', ':2: duplicate key "pro'),
    "cut.json": ('[{"prompt": "a"},\n{"prompt": "b"', ":2: not JSON: Expecting ',' delimiter"),
    "open.json": ('[{"prompt": "a"}\n', ":2: not JSON: expected a comma or the end of the list"),
    "no-comma.json": ('[{"prompt": "a"}\n{"prompt": "b"}]', ":2: not JSON: expected a comma"),
    "last-comma.json": ('["a",\n]', ":2: not JSON: Expecting value"),
    "more.json": ('["a"]\n["b"]\n', ":2: not JSON: there is more after the end of the list"),
    "more-after-none.json": ("[]\n\n x", ":3: not JSON: there is more after the end"),
    "empty.json": ("", ":1: no prompts in it"),
    "empty-list.json": (" [\n]", ":1: no prompts in it"),
    "deep.json": ("[" * 100_000, ":1: not usable JSON: nested too deeply"),
    "digits.json": (f"[{'9' * 5000}]", ":1: not usable JSON: a number is too long"),
    "no-column.jsonl": ('{"prompt": "a"}\n', ""),
}


@pytest.mark.parametrize("name", [name for name in BAD if name != "no-column.jsonl"])
def test_malformed_tables(name: str, tmp_path: Path) -> None:
    content, words = BAD[name]
    path = write(tmp_path / name, content)
    with pytest.raises(UsageError) as refused:
        load(path)
    assert refused.value.message.startswith(str(path))
    assert words in refused.value.message


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    for name, before, line in [("p.csv", b"prompt\na\n", 3), ("p.json", b'["a",\n', 2)]:
        (tmp_path / name).write_bytes(before + b'"caf\xe9"\n')
        with pytest.raises(UsageError, match=f"{name}:{line}: not UTF-8 text"):
            load(tmp_path / name)
    (tmp_path / "p.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UsageError, match="cannot be read as parquet"):
        load(tmp_path / "p.parquet")


def test_unknown_columns_and_splits(tmp_path: Path) -> None:
    for extension in ("csv", "parquet"):
        with pytest.raises(UsageError, match="no column 'quest': it has prompt, category"):
            load(table(tmp_path, extension), column="quest")
    with pytest.raises(UsageError, match=r'p.jsonl:1: has no column "quest": it has prompt, cat'):
        load(table(tmp_path, "jsonl"), column="quest")
    for split in ("test", "train[-3:]", "train[5:80%]", "train[5]", "train+train"):
        with pytest.raises(UsageError, match="a file has no split "):
            load(table(tmp_path, "jsonl"), split=split)
    with pytest.raises(UsageError, match="a file has no subsets"):
        load(table(tmp_path, "jsonl"), subset="main")
    with pytest.raises(UsageError, match="a text file has no columns"):
        load(write(tmp_path / "p.txt", "a\n"), column="prompt")


def test_a_split_of_no_rows(tmp_path: Path) -> None:
    for extension, split in (("csv", "train[9:]"), ("jsonl", "train[:0]")):
        path = table(tmp_path, extension)
        with pytest.raises(UsageError) as refused:
            load(path, split=split)
        assert refused.value.message == f"{path}: no prompts in {split}"
        assert refused.value.hint == "name another data.split"


def test_mixed_types_are_bad_rows(tmp_path: Path) -> None:
    rows = ['{"prompt": "a"}', '{"prompt": 5}', '{"prompt": null, "x": 1}', '{"prompt": [[]]}']
    path = write(tmp_path / "p.jsonl", "\n".join(rows))
    with pytest.raises(UsageError) as refused:
        load(path)
    assert [line.split(":")[1] for line in refused.value.message.splitlines()] == ["2", "3", "4"]


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "a", "text": None}, {"prompt": None, "text": None}],
        [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": None}, {"prompt_token_ids": [1, None]}],
        [{"turns": ["a"]}, {"turns": ["a", None]}, {"turns": None}],
        [{"messages": [{"role": "user", "content": one}]} for one in ("a", None)],
        [{"conversations": [{"from": "human", "value": one}]} for one in ("a", None)],
        [{"instruction": "a", "input": None, "category": None}, {"instruction": None}],
    ],
    ids=lambda rows: next(iter(rows[0])),
)
@pytest.mark.parametrize("skip_bad", [False, True])
def test_nulls_of_parquet_are_those_of_json(
    skip_bad: bool, rows: list[Any], tmp_path: Path
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    write(tmp_path / "p.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    found = []
    for name, place in (("p.jsonl", "p.jsonl:"), ("p.parquet", "p.parquet: row ")):
        try:
            prompts = load(tmp_path / name, skip_bad=skip_bad)
            found.append([(p.text, p.messages, p.token_ids, p.category) for p in prompts])
        except UsageError as refused:
            found.append([refused.message.replace(place, "row ")])
    assert found[0] == found[1]
    assert skip_bad or "row 2: " in str(found)


def test_bad_lines_may_be_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "p.jsonl", '{"prompt": "a"}\nx\n{"prompt": "b"}\n{}\n{"prompt": "c"}\n')
    with caplog.at_level(logging.WARNING, "specdec"):
        assert texts(load(path, skip_bad=True)) == ["a", "b", "c"]
        assert [r.getMessage() for r in caplog.records] == [
            f"skipped 2 bad lines, the first of them: {path}:2: not JSON: "
            "Expecting value at column 1"
        ]
        caplog.clear()
        # Rows past the limit are not read.
        assert texts(load(path, skip_bad=True, limit=2)) == ["a", "b"]
        assert "skipped 1 bad line: " in caplog.records[0].getMessage()
    assert texts(load(path, limit=1)) == ["a"]
    with pytest.raises(UsageError, match="all 2 lines are bad"):
        load(write(tmp_path / "q.jsonl", "x\ny\n"), skip_bad=True)


def test_a_csv_goes_on_after_a_bad_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "p.csv", 'prompt,x\na,1\n"b" c,2\nd,3\ne\nf,4\n')
    with caplog.at_level(logging.WARNING, "specdec"):
        assert texts(load(path, skip_bad=True)) == ["a", "d", "f"]
    assert "skipped 2 bad lines" in caplog.text


def test_an_open_quote_takes_the_rest_of_a_csv(tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", 'prompt,x\na,1\n"b,2\nc,3\nd,4\n')
    with pytest.raises(UsageError, match=r"p.csv:3: a quote in this row is never closed"):
        load(path, skip_bad=True)
    assert texts(load(path, limit=1)) == ["a"]


def test_turns_in_cells(tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", 'turns\n"[""a"", ""b""]"\nc [1]\n')
    assert [(prompt.text, prompt.later) for prompt in load(path)] == [("a", ("b",)), ("c [1]", ())]
    assert texts(load(path, column="turns")) == ["a", "c [1]"]


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    twice = pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"])
    parquet.write_table(twice, tmp_path / "p.parquet")
    with pytest.raises(UsageError, match=r"p\.parquet: two columns are called 'prompt'"):
        load(tmp_path / "p.parquet")


# Datasets by id, and folders laid out like one


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_dataset_folder(cache: Path) -> None:
    folder = cache / "d"
    folder.mkdir()
    lines = [json.dumps({"id": i, "question": f"q{i}"}) for i in range(4)]
    write(folder / "train.jsonl", "\n".join(lines))
    assert texts(load(folder)) == ["q0", "q1", "q2", "q3"]
    write(folder / "test.jsonl", lines[3])
    assert texts(load(folder, split="train[1:3]")) == ["q1", "q2"]
    assert texts(load(folder, split="test", column="question")) == ["q3"]
    for keys, words in [
        ({}, "has several splits: train, test"),
        ({"split": "dev"}, "Unknown split \"dev\". Should be one of ['train', 'test']"),
        ({"split": "train", "column": "answer"}, 'l:1: has no column "answer": it has id, ques'),
        ({"split": "train", "column": "id"}, "d/train.jsonl:1: id should be text"),
        ({"subset": "main"}, "BuilderConfig 'main' not found. Available: ['default']"),
    ]:
        with pytest.raises(UsageError) as refused:
            load(folder, **keys)
        assert words in refused.value.message


# Files that `datasets` would read differently: types are guessed, NA is null, lines may be blank.
LIKE_FILES = {
    "p.csv": "prompt,category\nNA,01\n7,null\n",
    "p.tsv": "prompt\tcategory\nNA\t01\n7\tnull\n",
    "p.txt": "a\n\n b \n",
    "p.jsonl": '{"prompt": "a", "category": 1}\n{"prompt": "b", "category": "01"}\n',
    "p.json": '["a", "b"]',
    "p.parquet": "",
}


@pytest.mark.parametrize("name", LIKE_FILES)
def test_a_folder_reads_like_its_file(name: str, cache: Path) -> None:
    folder = cache / "d"
    folder.mkdir()
    path = table(folder, "parquet") if name == "p.parquet" else folder / name
    if content := LIKE_FILES[name]:
        write(path, content)
    found = load(folder)
    assert found == load(path) and len(found) > 1
    assert [prompt.where for prompt in found] == [prompt.where for prompt in load(path)]
    assert load(folder, split="train[1:]") == load(path, split="train[1:]")
    path.write_bytes(b"")
    with pytest.raises(UsageError) as refused:
        load(folder)
    assert refused.value.message.startswith(str(folder))


def test_the_splits_of_a_folder(cache: Path) -> None:
    folder = cache / "d"
    (folder / "data").mkdir(parents=True)
    for split, part, rows in [("train", 0, "abc"), ("train", 1, "de"), ("test", 0, "fg")]:
        name = f"{split}-0000{part}-of-0000{2 if split == 'train' else 1}.csv"
        write(folder / "data" / name, "prompt\n" + "\n".join(rows))
    for split, rows in [
        *(("train", "abcde"), ("train[1:4]", "bcd"), ("train[80%:]", "e"), ("train[-2:]", "de")),
        *(("test+train[:1]", "fga"), ("all", "abcdefg")),
    ]:
        assert "".join(prompt.text or "" for prompt in load(folder, split=split)) == rows
    write(folder / "data" / "train-00001-of-00002.csv", "prompt\na,b\n")
    assert len(load(folder, split="train[:3]")) == 3  # the rest is not read


def test_files_of_a_folder_that_are_left_out(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = cache / "d"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl", ".c.csv", "config.json"):
        write(folder / name, '{"prompt": "x"}\n')
    assert len(load(folder)) == 2 and not caplog.records
    for name in ("d.csv", "e.txt"):
        write(folder / name, "prompt\n")
        assert len(load(folder)) == 2
    told = [record.getMessage() for record in caplog.records]
    has = "the dataset has a.jsonl and 1 more"
    assert told == [f"{folder}: left out {out}: {has}" for out in ("d.csv", "d.csv and 1 more")]
    configs = "[{config_name: x, data_files: a.jsonl}, {config_name: y, data_files: d.csv}]"
    write(folder / "README.md", f"---\nconfigs: {configs}\n---\n")
    caplog.clear()
    assert len(load(folder, subset="x")) == 1 and not caplog.records


def test_settings_of_files_are_followed(cache: Path) -> None:
    folder = cache / "d"
    folder.mkdir()
    write(folder / "p.csv", "prompt;x\na,b;1\n")
    configs = "configs: [{config_name: x, data_files: p.csv, sep: ';'}]"
    write(folder / "README.md", f"---\n{configs}\n---\n")
    assert texts(load(folder)) == ["a,b"]
    (folder / "p.csv").unlink()
    (folder / "README.md").unlink()
    (folder / "p.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    assert texts(load(folder)) == ["a"]
    (folder / "p.jsonl.gz").unlink()
    write(folder / "p.txt", "a\nb")
    assert texts(load(folder, column="text")) == ["a", "b"]


# Rows with objects of different keys, and lines of an OpenAI batch.
ASKED = {"role": "user", "content": "a"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"arguments": {"city": "Rome"}}]}
OTHER = {"role": "assistant", "content": None, "tool_calls": [{"arguments": {"x": [None, 1]}}]}
UNION: dict[str, list[dict[str, Any]]] = {
    "switches": [
        {"prompt": "a", "chat_template_kwargs": {"thinking": False}},
        {"prompt": "a", "chat_template_kwargs": {"other": 1}},
        {"prompt": "a", "chat_template_kwargs": None},
    ],
    "tools": [{"prompt": "a", "tools": [{"properties": {n: {"type": n}}}]} for n in "xy"],
    "calls": [{"messages": [ASKED, one, {**ASKED, "name": "n"}]} for one in (CALL, OTHER)],
    "batch": [{"custom_id": "1", "body": {"messages": [ASKED], "max_tokens": 5}}],
}


@pytest.mark.parametrize("kind", ["parquet", "saved", "arrow"])
@pytest.mark.parametrize("rows", UNION)
def test_keys_of_other_rows_are_not_given(rows: str, kind: str, cache: Path) -> None:
    import datasets

    lines = write(cache / "p.jsonl", "".join(json.dumps(row) + "\n" for row in UNION[rows]))
    whole, path = datasets.Dataset.from_list(UNION[rows]), cache / "d"
    if kind == "parquet":
        path = cache / "p.parquet"
        whole.to_parquet(path)
    else:
        whole.save_to_disk(path)
    if kind == "arrow":
        (path / "state.json").unlink()
        (path / "dataset_info.json").unlink()
    assert load(path) == load(lines)


def test_only_our_errors_are_shown(cache: Path) -> None:
    import datasets

    heard: list[logging.LogRecord] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record)

    folder, logger, ear = cache / "d", logging.getLogger("datasets"), Ear()
    folder.mkdir()
    (folder / "p.jsonl.gz").write_bytes(gzip.compress(b"{no"))
    logger.addHandler(ear)
    before = logger.level
    try:
        with pytest.raises(datasets.exceptions.DatasetGenerationError):
            datasets.load_dataset(str(folder))
        assert heard
        heard.clear()
        with pytest.raises(UsageError, match=r"d: cannot be read as a dataset: \S"):
            load(folder)
    finally:
        logger.removeHandler(ear)
    assert not heard and logger.level == before


def test_pipes_and_devices_in_a_dataset_are_not_read(cache: Path) -> None:
    folder = cache / "d"
    (folder / "data").mkdir(parents=True)
    write(folder / "train.jsonl", '{"prompt": "x"}')
    (folder / "nowhere.json").symlink_to("nowhere")
    assert texts(load(folder)) == ["x"]
    os.mkfifo(folder / "data" / "more.jsonl")
    with pytest.raises(UsageError, match=r"d/data/more.jsonl is not a regular file"):
        load(folder)
    (folder / "data" / "more.jsonl").unlink()
    (folder / ".huggingface.yaml").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=r"d/.huggingface.yaml is not a regular file"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "card", "is_read"),
    [
        ("README.md", "---\nx: [%s]\n---\n", False),
        ("README.md", "---\nx: 1\n---\n%s", True),  # a long text after short settings
        ("README.md", "%s", True),
        (".huggingface.yaml", "x: [%s]", False),
    ],
)
def test_settings_that_take_minutes_are_refused(
    name: str, card: str, is_read: bool, cache: Path
) -> None:
    folder = cache / "d"
    folder.mkdir()
    write(folder / "train.jsonl", '{"prompt": "x"}')
    write(folder / name, card % ("{}, " * 400_000))
    if is_read:
        assert texts(load(folder)) == ["x"]
        return
    with pytest.raises(UsageError, match="settings of the dataset are longer than 1024 KiB"):
        load(folder)


def test_what_save_to_disk_wrote(cache: Path) -> None:
    import datasets

    whole = datasets.Dataset.from_dict({"question": [f"q{i}" for i in range(10)], "x": range(10)})
    few = datasets.Dataset.from_dict({"question": ["one"]})
    whole.save_to_disk(cache / "whole")
    datasets.DatasetDict({"train": whole, "test": few}).save_to_disk(cache / "both")
    datasets.DatasetDict({"dev": few}).save_to_disk(cache / "one")
    everything = [f"q{i}" for i in range(10)]
    assert texts(load(cache / "whole")) == everything
    assert texts(load(cache / "whole", split="train[2:4]", column="question")) == ["q2", "q3"]
    assert texts(load(cache / "both", split="train[50%:]")) == everything[5:]
    assert texts(load(cache / "both", split="test+train[:1]")) == ["one", "q0"]
    assert texts(load(cache / "one")) == ["one"]
    for name, keys, words in [
        ("both", {}, "has several splits: train, test"),
        ("both", {"split": "dev"}, 'Unknown split "dev"'),
        ("both", {"split": "train[:1"}, "train[:1"),
        ("whole", {"subset": "main"}, "a saved dataset has no subsets"),
        ("whole", {"column": "answer"}, "no column 'answer': it has question, x"),
    ]:
        with pytest.raises(UsageError) as refused:
            load(cache / name, **keys)
        assert words in refused.value.message
    arrow = cache / "whole" / "data-00000-of-00001.arrow"
    content = bytearray(arrow.read_bytes())
    at = content.index(struct.pack("<4i", 0, 2, 4, 6))  # where texts begin
    content[at + 4 : at + 8] = struct.pack("<i", -2)
    arrow.write_bytes(content)
    with pytest.raises(UsageError, match=r"whole: row 1: cannot be read"):
        load(cache / "whole")
    arrow.write_bytes(b"nothing")
    with pytest.raises(UsageError, match="cannot be read as a dataset"):
        load(cache / "whole")


def test_an_id_that_cannot_be_had(cache: Path) -> None:
    with pytest.raises(SetupError) as refused:
        load("owner/name")
    assert "neither a local file nor in the local cache" in refused.value.message
    assert refused.value.hint is not None
    assert "hf download --repo-type dataset owner/name" in refused.value.hint


def test_a_hub_out_of_reach_is_asked_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    asked = []

    def out_of_reach(*arguments: object, **more: object) -> None:
        asked.append(arguments)
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", out_of_reach)
    monkeypatch.setattr(datasets, "load_dataset_builder", out_of_reach)
    with pytest.raises(SetupError, match="could not be downloaded"):
        load("owner/name")
    assert len(asked) == 1
    (cache / "cache" / "owner___my_name").mkdir(parents=True)
    with pytest.raises(SetupError, match="could not be downloaded"):
        load("owner/MyName")  # `datasets` looks into its cache
    assert asked[1:] == [("owner/MyName",)]


def test_what_the_hubs_client_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def out_of_reach(*arguments: object, **more: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", out_of_reach)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache / "hub"))
    folder = cache / "hub" / "datasets--owner--name"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    write(folder / "refs" / "main", "0" * 40)
    write(folder / "rows", "prompt\nNA\n")
    (snapshot / "train.csv").symlink_to(folder / "rows")
    assert texts(load("owner/name")) == ["NA"]
    (snapshot / "test.csv").symlink_to(folder / "rows")
    with pytest.raises(UsageError) as refused:
        load("owner/name")
    assert refused.value.message == "owner/name: the dataset has several splits: train, test"
    assert texts(load("owner/name", split="test")) == ["NA"]


@pytest.mark.parametrize("path", ["missing.jsonl", "./x", "/a/b", "a/b/c", "x:y", "a\\b"])
def test_what_looks_like_a_path_is_no_id(path: str) -> None:
    with pytest.raises(UsageError, match="no such prompt file"):
        load(path)


def test_an_address() -> None:
    with pytest.raises(UsageError, match="is a URL"):
        load("https://host/p.jsonl")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path, "parquet")
    for name in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    for what in (path, "squad"):
        with pytest.raises(SetupError) as refused:
            load(what)
        assert "needs the package" in refused.value.message
        assert refused.value.hint is not None and "pip install datasets" in refused.value.hint
    assert len(load(table(tmp_path, "csv"))) == 3


def test_files_of_text_need_no_package(tmp_path: Path) -> None:
    paths = [str(table(tmp_path, extension)) for extension in ("jsonl", "json", "csv", "tsv")]
    code = (
        "import sys; from specdec_cli.prompts import load_prompts; "
        "from specdec_cli.recipe.sections import DataSection; "
        f"[load_prompts(DataSection(path=p)) for p in {paths!r}]; "
        "sys.exit(bool({'datasets', 'pyarrow', 'pandas', 'torch'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
