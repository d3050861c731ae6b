"""`specdec recipe`, and recipes made from options and --set."""

import json
from pathlib import Path

import pytest
import yaml

from specdec_cli.app import main
from specdec_cli.commands.options import (
    OPTION_KEYS,
    parse_sets,
    resolve,
)
from specdec_cli.errors import UsageError
from specdec_cli.recipe import Recipe, load_recipe
from specdec_cli.recipe.schema import key_fields

Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture, *arguments: str) -> str:
    assert main(["recipe", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_ls(capsys: Capture) -> None:
    names = [line.split()[0] for line in printed(capsys, "ls").splitlines()]
    assert names == [r["name"] for r in json.loads(printed(capsys, "ls", "--json"))["recipes"]]
    assert "demo" in names
    assert ["bench" in name for name in names] == sorted("bench" in name for name in names)


def test_quiet_and_verbose_are_known_as_everywhere(capsys: Capture) -> None:
    for arguments in (["ls"], ["show", "demo"], ["validate", "demo"], ["schema"]):
        assert printed(capsys, *arguments, "-q", "-v") == printed(capsys, *arguments)


def test_show_is_the_file_with_its_comments(capsys: Capture) -> None:
    text = printed(capsys, "show", "demo")
    assert text.startswith("# The bundled pair")
    assert printed(capsys, "show", "demo.yaml") == text


def test_show_resolved(capsys: Capture) -> None:
    resolved = yaml.safe_load(printed(capsys, "show", "demo", "--resolved"))
    assert resolved == load_recipe("demo").model_dump(mode="json")
    assert json.loads(printed(capsys, "show", "demo", "--json"))["recipe"] == resolved
    changed = yaml.safe_load(printed(capsys, "show", "demo", "--set", "run.seed=7"))
    assert changed["run"]["seed"] == 7


def test_validate(capsys: Capture, tmp_path: Path) -> None:
    assert printed(capsys, "validate", "demo", "llama-3.1-8b-1b").count(": ok\n") == 2
    valid = {"schema": "specdec.recipe-validate/1", "valid": ["demo"], "warnings": []}
    assert json.loads(printed(capsys, "validate", "demo", "--json")) == valid
    bad = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for path in bad:
        path.write_text("target: {model: t}\nx: 1\n")
    assert main(["recipe", "validate", str(bad[0]), "demo", str(bad[1])]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines[:2]] == [f"{path}:2" for path in bad]
    assert main(["recipe", "validate", str(bad[0])]) == 2


def test_schema(capsys: Capture) -> None:
    lines = printed(capsys, "schema").splitlines()
    assert [line.split()[0] for line in lines] == list(key_fields())
    schema = json.loads(printed(capsys, "schema", "--json"))
    assert schema["additionalProperties"] is False
    assert list(schema["properties"]) == list(Recipe.model_fields)
    top_p = schema["$defs"]["SamplingSection"]["properties"]["top_p"]
    assert (top_p["exclusiveMinimum"], top_p["maximum"]) == (0.0, 1.0)


def test_options_name_real_keys() -> None:
    assert {key for _, key in OPTION_KEYS.values()} - {"*.dtype"} <= key_fields().keys()


def test_precedence(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("target: {model: t}\nsampling: {top_k: 1, temperature: 0.1, top_p: 0.1}\n")
    sets = ["sampling.top_k=2", "sampling.temperature=0.2"]
    recipe = resolve(str(path), sets, {"top_k": 3, "seed": None, "ignore_eos": True})
    sampling = recipe.sampling
    assert (sampling.top_k, sampling.temperature, sampling.top_p) == (3, 0.2, 0.1)
    assert sampling.ignore_eos is True and recipe.run.seed == 0


def test_every_option_lands_on_its_key() -> None:
    options: dict[str, object] = {
        "target": "t", "draft": "d", "target_tp": 4, "draft_tp": 2, "num_speculative_tokens": 3,
        "dtype": "float16", "device": "cuda:1", "temperature": 0.5, "top_k": 6, "top_p": 0.7,
        "max_new_tokens": 8, "ignore_eos": True, "batch_size": 9, "seed": 10, "num_blocks": 11,
        "block_size": 12,
    }  # fmt: skip
    recipe = resolve(None, None, options).model_dump()
    for name, value in options.items():
        section, key = OPTION_KEYS[name][1].replace("*", "draft").split(".")
        assert recipe[section][key] == value, name
    assert recipe["target"]["dtype"] == "float16"


@pytest.mark.parametrize(
    ("item", "key", "value"),
    [
        ("a.b=1e-3", "a.b", 0.001),
        ("draft=null", "draft", None),
        ("draft=", "draft", None),
        ("run.compile=on", "run.compile", "on"),
        ("sampling.stop=['a', \"\\n\"]", "sampling.stop", ["a", "\n"]),
        (" a.b = x=y ", "a.b", "x=y"),
        ("data.path=d:train[:100]", "data.path", "d:train[:100]"),
    ],
)
def test_set(item: str, key: str, value: object) -> None:
    assert parse_sets([item]) == {key: value}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("a.b", "--set: expected KEY=VALUE, got 'a.b'"),
        ("=1", "--set: expected KEY=VALUE"),
        ("a=[1", "--set a: not valid YAML"),
        ("a={b: 1, b: 2}", "--set a: b: duplicate key"),
        ("a=!!python/name:os.system x", "--set a: the tag"),
        ("a=\x00", "--set a: a character that YAML does not allow (U+0000)"),
    ],
)
def test_bad_set(item: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_sets([item])
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("sets", "options", "message"),
    [
        (["run.sed=1"], {}, "--set: run.sed: unknown key (did you mean run.seed?)"),
        (["run.seed=x"], {}, '--set: run.seed: should be a whole number, not "x"'),
        ([], {"temperature": -1.0}, "--temperature: sampling.temperature: should be greater"),
        ([], {"draft_tp": 2}, "--draft-tp: draft.tensor_parallel_size: draft.tensor_parallel_"),
        ([], {"dtype": "bf16"}, "--dtype: target.dtype: should be auto, float32, bfloat16 or "),
        (["run.seed=x"], {"seed": -1}, "--seed: run.seed: should be greater than or equal to 0"),
    ],
)
def test_bad_values_name_their_option(
    sets: list[str], options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(None, sets, options)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("sets", "given", "message"),
    [
        (["sampling.top_p=hot"], {"top_p": 0.5}, "--set: sampling.top_p: should be a number"),
        (["run.seed=-1"], {"seed": 3}, "--set: run.seed: should be greater than or equal to 0"),
        (["draft.dtype=int3"], {"draft": "ngram"}, "--set: draft.dtype: should be auto, float32"),
        (["run.seed=-1"], {}, "--set: run.seed: should be greater than or equal to 0"),
    ],
)  # fmt: skip
def test_a_value_that_an_option_replaces_is_checked(
    sets: list[str], given: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        resolve("demo", sets, given)
    assert refused.value.message.startswith(message) and "\n" not in refused.value.message


def test_a_value_of_a_file_that_is_replaced_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "target: {model: t}\ndraft:\n  model: d\n  tensor_parallel_size: 2\n  dtypes: x\n"
        "sampling:\n  top_p: 7\nspeculation:\n  length: {policy: no}\n  method: draft_model\n"
    )
    given = {"draft": "ngram", "top_p": 0.5}
    with pytest.raises(UsageError) as refused:
        resolve(str(path), ["speculation.length.policy=fixed"], given)
    lines = refused.value.message.splitlines()
    assert len(lines) == 3
    for line, words in zip(
        lines, ("2: draft.dtypes: unknown", "7: sampling.top_p: should", "9: speculation.length")
    , strict=True):  # fmt: skip
        assert words in line
    # What only the whole recipe can tell is told of what runs: here 2 divides 4.
    path.write_text("target: {model: t}\ndraft: {model: d, tensor_parallel_size: 2}\n")
    assert resolve(str(path), None, {"target_tp": 4}).target.tensor_parallel_size == 4


def test_methods_by_name(tmp_path: Path) -> None:
    """A method without a draft model may stand wherever a draft may, or in --method."""
    for sets, given in (
        ([], {"draft": "ngram"}),
        (["draft.model=ngram"], {}),
        ([], {"method": "ngram"}),
        (["draft=null", "speculation.method=ngram"], {}),
    ):
        assert resolve("demo", sets, given).speculation.method == "ngram"
    assert resolve("demo", ["draft.model=ngram"], {}).draft is None
    path = tmp_path / "r.yaml"
    path.write_text("target: {model: t}\ndraft: {model: ngram}\n")
    assert load_recipe(str(path)).draft is None
    assert load_recipe(str(path)).speculation.method == "ngram"
    assert resolve("demo", None, {"method": "none"}).speculation.method == "none"
    with pytest.raises(UsageError, match=r"--method: speculation\.method: should be draft_model"):
        resolve("demo", None, {"method": "ngrams"})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("specdec sweep-k --set sampling.top", ["sampling.top_k=", "sampling.top_p="]),
        ("specdec generate demo-", ["demo-ngram", "demo-sampled"]),
        ("specdec recipe show demo-n", ["demo-ngram"]),
    ],
)
def test_the_shell_completes_recipes_and_keys(
    words: str, expected: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_SPECDEC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    main([])
    captured = capsys.readouterr()
    assert (captured.out.split(), captured.err) == (expected, "")
