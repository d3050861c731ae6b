"""Recipes and data files made to take long: linear time, or a limit that the message says."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec_cli.errors import UsageError
from specdec_cli.prompts import load_prompts
from specdec_cli.recipe import DataSection, load_recipe, source

GOOD = "target: {model: t}\n"
MANY = 20_000


def refused(read: Callable[[], object]) -> str:
    """The message of the error that `read` raises, within a second."""
    start = time.process_time()
    with pytest.raises(UsageError) as error:
        read()
    assert time.process_time() - start < 1.0
    return error.value.message


def test_digits_of_a_number_are_read_once(tmp_path: Path) -> None:
    recipe = tmp_path / "digits.yaml"
    recipe.write_text(f'{GOOD}sampling: {{temperature: "{"1" * 20_000}"}}\n')
    said = refused(lambda: load_recipe(str(recipe)))
    assert "sampling.temperature: should be a number" in said


def test_a_recipe_of_many_keys_is_refused_before_it_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "MAX_NODES", 100)
    recipe = tmp_path / "keys.yaml"
    recipe.write_text(GOOD + "a:\n" * 100 + "'")
    said = refused(lambda: load_recipe(str(recipe)))
    assert said == f"{recipe}:49: more than 100 keys and values, not a recipe"


def test_columns_and_keys_are_compared_once(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(MANY)]
    table, rows = tmp_path / "many.csv", tmp_path / "many.json"
    table.write_text(",".join([*names, "c19999"]) + "\n")
    said = refused(lambda: load_prompts(DataSection(path=str(table))))
    assert said == f"{table}:1: two columns are called 'c19999'"
    rows.write_text("[{" + ", ".join(f'"{name}": 1' for name in [*names, names[-1]]) + "}]")
    said = refused(lambda: load_prompts(DataSection(path=str(rows))))
    assert said == f'{rows}:1: duplicate key "c19999"'
