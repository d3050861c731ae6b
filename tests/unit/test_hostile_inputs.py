"""Files made to take long, or memory: linear time, or a limit that the message says."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec_cli.errors import SetupError, SpecdecError, UsageError
from specdec_cli.models import config_file, weights
from specdec_cli.prompts import load_prompts
from specdec_cli.recipe import DataSection, load_recipe, source

GOOD = "target: {model: t}\n"
MANY = 20_000


def refused(read: Callable[[], object], kind: type[SpecdecError] = UsageError) -> str:
    """The message of the error that `read` raises, within a second."""
    start = time.process_time()
    with pytest.raises(kind) as error:
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**12),
        ("num_hidden_layers", 1e12),
        ("n_layer", "many"),
        ("num_experts", 10**9),
        ("vocab_size", 0),
        ("hidden_size", True),
        ("intermediate_size", [128, -1]),
        ("max_position_embeddings", 1.5),
        ("initializer_range", -1),
        ("initializer_range", None),
        ("initializer_range", float("nan")),
        ("initializer_range", 1.5),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_counts_that_no_model_has_are_refused_by_their_key(
    key: str, value: object, is_nested: bool, tmp_path: Path
) -> None:
    config = {"model_type": "llama", key: value}
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": config} if is_nested else config)
    )
    said = refused(lambda: config_file.config_file("m", tmp_path), SetupError)
    wrong = value[1] if isinstance(value, list) else value
    assert said == f"config.json of m: {key} is {json.dumps(wrong)}"


def test_configs_are_small_regular_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama"}')
    assert config_file.config_file("m", tmp_path) == {"model_type": "llama"}
    monkeypatch.setattr(config_file, "MAX_BYTES", 1)
    assert "larger than" in refused(lambda: config_file.config_file("m", tmp_path), SetupError)
    monkeypatch.undo()
    file.write_text("[" * 100_000)
    assert "recursion" in refused(lambda: config_file.config_file("m", tmp_path), SetupError)
    file.unlink()
    os.mkfifo(file)
    assert "not a regular" in refused(lambda: config_file.config_file("m", tmp_path), SetupError)


def test_a_missing_file_with_a_line_break_is_told_in_one_line(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "x\ny" + "n" * 5000}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    said = refused(lambda: weights.weight_files(tmp_path), SetupError)
    assert said.startswith(f"{tmp_path} lacks 1 of 1 weight files, first x\\nynn")
    assert "\n" not in said and len(said) < 400


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map": ' + '{"a": ' * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"weight_map": [1, 2]}',
        '{"weight_map": {"a": 1}}',
        "{}",
    ],
    ids=["nested", "closed", "list", "number", "nothing"],
)
def test_a_damaged_index_of_weights_is_told_in_one_line(text: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    said = refused(lambda: weights.weight_files(tmp_path), SetupError)
    assert said.startswith(f"{index} is not a weight index: ") and len(said) < 300
    assert "\n" not in said
