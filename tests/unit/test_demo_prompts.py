"""The file of demo prompts: its schema, its spread over categories, and its origin."""

import ast
import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

import specdec_cli

CATEGORIES = {"data", "text", "io", "net", "math"}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    path = Path(specdec_cli.__file__).parent / "demo" / "prompts.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_count_and_schema(rows):
    assert len(rows) == 200
    assert all(set(row) == {"prompt", "category", "source"} for row in rows)
    assert all(isinstance(value, str) and value for row in rows for value in row.values())


def test_categories_are_evenly_filled(rows):
    counts = Counter(row["category"] for row in rows)
    assert set(counts) == CATEGORIES
    assert min(counts.values()) >= 30


def test_no_duplicates(rows):
    assert len({row["prompt"] for row in rows}) == len(rows)


def test_many_modules(rows):
    modules = Counter(row["source"].split(".")[0] for row in rows)
    assert len(modules) >= 20
    assert max(modules.values()) <= 25


def test_prompt_ends_after_its_docstring(rows):
    for row in rows:
        prompt = row["prompt"]
        assert prompt.endswith(('"""\n', "'''\n", '"\n', "'\n")), row["source"]
        tree = ast.parse(prompt)
        inner = list(ast.walk(tree))
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        names = [node.name for node in inner if isinstance(node, kinds)]
        assert row["source"].split(".")[1:] == names


def test_source_modules_exist(rows):
    for module in {row["source"].split(".")[0] for row in rows}:
        assert importlib.util.find_spec(module) is not None, module
