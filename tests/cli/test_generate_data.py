"""`specdec generate` on data files: `data.*` of a recipe, and options that change it."""

import json
from pathlib import Path

import pytest
import yaml

from specdec_cli.recipe import load_recipe
from tests.cli.generate_helpers import Run, generate, specdec
from tests.unit.test_datasets import spec_bench, table

pytestmark = pytest.mark.usefixtures("small_demo")

SHORT = ("--max-new-tokens", "2", "--ignore-eos", "-k", "1", "--json", "-q")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *arguments: generate(capsys, *arguments, *SHORT)


def test_spec_bench(run: Run, tmp_path: Path) -> None:
    path = spec_bench(tmp_path)
    result = run("--set", f"data.path={path}", "-o", tmp_path / "out")
    assert result.code == 0
    assert [o["prompt"] for o in result.outputs] == ["q0", "q1", "q2", "q3"]
    assert [o["category"] for o in result.outputs] == ["writing", "qa", "writing", "qa"]
    samples = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["category"] for line in samples} == {"writing", "qa"}


@pytest.mark.parametrize("extension", ["csv", "parquet"])
def test_tables(extension: str, run: Run, tmp_path: Path) -> None:
    path = table(tmp_path, extension)
    keys = ["data.split=train[1:]", "data.column=category", "data.limit=1"]
    sets = [part for key in keys for part in ("--set", key)]
    (by_path,) = run("--set", f"data.path={path}", *sets).outputs
    assert by_path["prompt"] == "text"
    (by_file,) = run("--prompt-file", path, *sets, "-o", tmp_path / "out").outputs
    assert by_file["token_ids"] == by_path["token_ids"] and by_file["prompt"] == "text"
    data = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())["data"]
    assert (data["path"], data["split"], data["column"], data["limit"]) == (
        str(path),
        "train[1:]",
        "category",
        1,
    )


def test_limit(run: Run, tmp_path: Path) -> None:
    path = spec_bench(tmp_path, count=6)
    # The demo recipe's limit applies only to its own prompts.
    assert len(run("--prompt-file", path).outputs) == 6
    (third, fourth) = run("--dataset", f"{path}:train[2:]", "--limit", "2").outputs
    assert third["prompt"] != fourth["prompt"]
    drawn = run("--dataset", path, "--limit", "2", "--sample", "stratified").outputs
    assert len({output["category"] for output in drawn}) == 2
    assert len(run("--prompt-file", path, "--set", "data.limit=3").outputs) == 3
    assert len(run("--prompt-file", path, "--set", "data.limit=3", "--limit", "1").outputs) == 1
    assert len(run("--limit", "1").outputs) == 1
    for limit in ("0", str(2**31)):
        result = run("--prompt-file", path, "--limit", limit)
        assert result.code == 2 and "--limit" in result.document["error"]["message"]
    run("--prompt-file", path, "--limit", str(2**31 - 1), "-o", tmp_path / "out")
    data = load_recipe(str(tmp_path / "out" / "recipe.yaml")).data
    assert data is not None and data.limit == 2**31 - 1


def test_what_a_recipe_says_of_its_prompts_is_not_said_of_others(run: Run, tmp_path: Path) -> None:
    data = f"{{path: {table(tmp_path, 'csv')}, column: category, split: 'train[:1]', limit: 1}}"
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"target: {{model: 'demo:target'}}\ndata: {data}\n")
    assert [o["prompt"] for o in run(recipe, "-k", "0").outputs] == ["math"]
    assert len(run(recipe, "-k", "0", "--prompt-file", spec_bench(tmp_path)).outputs) == 4


def test_bad_lines(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": 5}\n{"prompt": "b"}\nx\n')
    for source in (["--prompt-file", path], ["--set", f"data.path={path}"]):
        assert run(*source).code == 2
        arguments = [*source, "--skip-bad", *SHORT]
        arguments.remove("-q")  # -q also silences warnings
        result = generate(capsys, *arguments)
        assert [o["prompt"] for o in result.outputs] == ["a", "b"]
    warning = specdec("generate", "--prompt-file", path, "--skip-bad", *SHORT[:-1]).err
    assert f"warning: skipped 2 bad lines, the first of them: {path}:2: prompt should" in warning


def test_a_dataset_that_cannot_be_had(run: Run) -> None:
    pytest.importorskip("datasets")
    result = run("--set", "data.path=owner/nothing")
    assert result.code == 5
    assert "neither a local file nor in the local cache" in result.document["error"]["message"]
