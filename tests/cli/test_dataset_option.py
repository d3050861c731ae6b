"""`--dataset` and `--limit` beside `--set` and a recipe: precedence and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.recipe import Recipe
from tests.cli.sweep_helpers import specdec

pytestmark = pytest.mark.usefixtures("small_demo")

DRY = ["--device", "cpu", "--max-new-tokens", "2", "--dry-run", "--json", "-q"]
ROWS = ("first", "second", "third")

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def command() -> str:
    """The command of most cases: all commands read prompts in one place (`test_every_source`)."""
    return "sweep-k"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of three prompts with two columns each."""
    path = tmp_path / "rows.csv"
    path.write_text("prompt,other\n" + "".join(f"{row},{row} again\n" for row in ROWS))
    return path


def data_of(capsys: Capture, *arguments: str | Path) -> dict[str, Any]:
    """The data section of a dry run, with the number of prompts under `num_prompts`."""
    result = specdec(capsys, *arguments, *DRY)
    assert result.code == 0, result.err + result.out
    document = result.document
    settings = document["sweep" if "sweep" in document else "comparison"]
    data = Recipe.model_validate(document["recipe"]).data  # the recipe runs again
    assert data is not None
    return {"num_prompts": settings["prompts"]["count"], **data.model_dump()}


@pytest.mark.parametrize(
    ("key", "value", "num_prompts"),
    [("limit", 1, 1), ("split", "train[1:]", 2), ("column", "other", 3)],
    ids=["limit", "split", "column"],
)
def test_set_speaks_of_the_dataset(
    command: str, key: str, value: object, num_prompts: int, capsys: Capture, rows: Path
) -> None:
    expected = {"num_prompts": num_prompts, "path": str(rows), key: value}
    for item in (f"data.{key}={json.dumps(value)}", f"data={json.dumps({key: value})}"):
        found = data_of(capsys, command, "--dataset", rows, "--set", item)
        assert found.items() >= expected.items()


def test_a_subset_speaks_of_the_dataset(command: str, capsys: Capture, rows: Path) -> None:
    chosen = ["--dataset", rows, "--set", "data.subset=main"]
    result = specdec(capsys, command, *chosen, *DRY)
    assert result.code == 2 and "a file has no subsets" in result.document["error"]["message"]


def test_the_dataset_and_the_limit_come_before_set(
    command: str, capsys: Capture, rows: Path
) -> None:
    keys = ["data.split=train[2:]", "data.column=none", "data.limit=1"]
    sets = [part for key in keys for part in ("--set", key)]
    found = data_of(capsys, command, "--dataset", f"{rows}:train[1:]:other", "--limit", "2", *sets)
    assert (found["split"], found["column"], found["limit"]) == ("train[1:]", "other", 2)
    assert found["num_prompts"] == 2


def test_what_a_recipe_says_of_its_prompts_is_not_said_of_others(
    command: str, capsys: Capture, rows: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "r.yaml"
    data = "{path: nowhere, split: s, subset: u, column: c, limit: 1}"
    pair = "target: {model: 'demo:target'}\ndraft: {model: 'demo:draft'}\n"
    recipe.write_text(f"{pair}data: {data}\n")
    stale = dict.fromkeys(("split", "subset", "column", "limit"))
    found = data_of(capsys, command, recipe, "--dataset", rows)
    assert found.items() >= {"num_prompts": 3, **stale}.items()
    found = data_of(capsys, command, recipe, "--dataset", rows, "--set", "data.limit=2")
    assert found.items() >= {"num_prompts": 2, **stale, "limit": 2}.items()
    recipe.write_text(pair)  # no data section, so no key of it can be set
    found = data_of(capsys, command, recipe, "--dataset", rows, "--set", "data.limit=2")
    assert found["num_prompts"] == 2


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (": ", "data.split: should be more than white space"),
        (":: ", "data.column: should be more than white space"),
        (":a\udcff", "data.split: should be valid Unicode text"),
        ("::\udcff", "data.column: should be valid Unicode text"),
        ("\udcff", "data.path: should be valid Unicode text"),
    ],
)
def test_what_no_recipe_can_hold(
    command: str, tail: str, message: str, capsys: Capture, rows: Path
) -> None:
    result = specdec(capsys, command, "--dataset", f"{rows}{tail}", *DRY)
    assert (result.code, result.document["error"]["message"]) == (2, f"--dataset: {message}")
    assert "Traceback" not in result.err


def test_a_limit_that_no_recipe_can_hold(command: str, capsys: Capture, rows: Path) -> None:
    most = 2**31 - 1
    result = specdec(capsys, command, "--dataset", rows, "--limit", most + 1, *DRY)
    assert result.code == 2 and "--limit: should be" in result.document["error"]["message"]
    assert data_of(capsys, command, "--dataset", rows, "--limit", most)["limit"] == most


@pytest.mark.parametrize("command", ["sweep-k", "compare-tp"])
def test_every_source(command: str, capsys: Capture, rows: Path, tmp_path: Path) -> None:
    """A source means the same everywhere; prompts that no file holds stay with the run folder."""
    assert data_of(capsys, command, "--prompt-file", rows)["path"] == str(rows)
    result = specdec(capsys, command, "--prompt", "a", "--prompt", "b", *DRY)
    assert (result.code, result.document["recipe"]["data"]) == (0, None)
    settings = result.document["sweep" if command == "sweep-k" else "comparison"]
    assert settings["prompts"]["count"] == 2
    split = data_of(capsys, command, "--dataset", f"{rows}:train[1:]:other", "--limit", "1")
    assert (split["split"], split["column"], split["num_prompts"]) == ("train[1:]", "other", 1)
    given = specdec(capsys, command, "--prompt", "a", "--dataset", rows, *DRY)
    assert given.code == 2 and "exclude each other" in given.document["error"]["message"]
    nameless = specdec(capsys, command, "--sample", "some", "--limit", 2, *DRY)
    assert "expected random or stratified" in nameless.document["error"]["message"]
    found = data_of(capsys, command, "--dataset", rows, "--limit", "2", "--sample", "random")
    assert (found["num_prompts"], found["limit"], found["sample"]) == (2, 2, "random")
