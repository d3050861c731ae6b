"""Loading recipes: defaults, precedence, overrides, paths and the way back to YAML."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from specdec_cli.errors import UsageError
from specdec_cli.recipe import Recipe, bundled_recipes, dump_recipe, load_recipe
from specdec_cli.recipe.resolve import find_source
from specdec_cli.recipe.schema import key_fields, section_models
from specdec_cli.recipe.source import parse_value, value_text

CONTRACT = """
target: {model: t, revision: null, tensor_parallel_size: 4, dtype: auto, load_format: auto}
draft:  {model: d, revision: null, tensor_parallel_size: 1, dtype: auto, load_format: auto, share: []}
speculation: {method: draft_model, num_speculative_tokens: 5, acceptance: rejection, synthetic_acceptance_rates: null, synthetic_acceptance_length: null, ngram_max: 4, ngram_min: 1}
sampling: {temperature: 0.0, top_k: 0, top_p: 1.0, max_new_tokens: 256, ignore_eos: false, stop: []}
cache: {block_size: 16, gpu_memory_utilization: 0.9, num_blocks: null, max_model_len: null, cpu_bytes: null}
run: {batch_size: 1, device: auto, seed: 0, compile: auto, cuda_graphs: auto, warmup: 1, repeats: 3, prefill_chunk: 2048, timeout_s: 120}
data: {path: p, split: null, subset: null, column: null, limit: null, chat: auto}
"""  # noqa: E501

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(text: str) -> str:
        path = tmp_path / "r.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return to_file


def test_contract_keys_and_defaults(write: Write) -> None:
    written = yaml.safe_load(CONTRACT)
    written["data"] |= {"system": None, "sample": None}  # came later, as did
    written["data"] |= {"turn": 1, "categories": "own"}
    written["data"] |= {"template": {}, "chat_template": None, "date": None}
    written["sampling"] |= {"from": "recipe", "repetition_penalty": 1.0}
    written["sampling"] |= {"suppress_tokens": [], "min_new_tokens": 0}
    for role in ("target", "draft"):
        written[role] |= {"file": None, "weights": "auto"}
    fixed = {"policy": "fixed", "threshold": 0.4, "choices": [0, 1, 2, 4, 8]}
    written["speculation"] |= {"length": fixed, "typical_threshold": 0.09, "typical_alpha": 0.3}
    written["speculation"] |= {"eagle3_layers": None, "eagle3_counting": None, "options": {}}
    readings = {"fed_back": "normed", "first_embedding": "used", "copies": "ignored"}
    written["speculation"] |= {f"mtp_{key}": value for key, value in readings.items()}
    written["speculation"] |= {"block_width": "k"}
    written["cache"] |= {"dtype": "auto"}
    written["engine"] = {"kind": "native", "launch": None, "args": [], "env": {}}
    written["engine"] |= {"served_model": None, "start_timeout_s": 900.0, "stop_timeout_s": 30.0}
    written["engine"] |= {"request_timeout_s": 600.0, "retries": 2}
    written["load"] = {"request_rate": None, "arrivals": "poisson", "max_concurrency": None}
    written["load"] |= {"duration_s": None, "slo": {}}
    recipe = load_recipe(write(CONTRACT))
    assert recipe.model_dump(mode="json") == written
    bare = {"target": {"model": "t", "tensor_parallel_size": 4}, "draft": {"model": "d"}}
    bare["data"] = {"path": "p"}
    assert Recipe.model_validate(bare) == recipe


def test_section_table_matches_the_recipe() -> None:
    assert list(section_models()) == list(Recipe.model_fields)
    assert all(info.description for info in key_fields().values())


def test_a_recipe_is_frozen(write: Write) -> None:
    recipe = load_recipe(write("target: {model: t}"))
    with pytest.raises(ValueError, match="frozen"):
        recipe.run.seed = 3  # type: ignore[misc]


def test_bundled_recipes_are_valid() -> None:
    names = [recipe.name for recipe in bundled_recipes()]
    assert names == [
        "demo",
        "demo-ngram",
        "demo-sampled",
        "deepseek-v3-mtp",
        "glm-4.5-air-fp8-mtp",
        "glm-4.5-air-mtp",
        "glm-4.6-fp8-mtp",
        "glm-4.6-mtp",
        "gpt-oss-120b-eagle3-tp4",
        "gpt-oss-20b-eagle3",
        "llama-3.1-70b-8b-tp4",
        "llama-3.1-8b-1b",
        "llama-3.1-8b-eagle3",
        "llama-3.1-8b-fp8-1b",
        "llama-3.1-8b-w4a16-1b",
        "llama-3.3-70b-eagle3-tp4",
        "llama-3.3-70b-fp8-1b",
        "mimo-v2-flash-mtp",
        "qwen3-8b-awq-eagle3",
        "qwen3-8b-eagle3",
        "qwen3-8b-fp8-eagle3",
        "smollm2",
        "smollm2-offline",
        "bench-30b-a3b-dummy",
        "bench-30b-a3b-eagle3-dummy",
        "bench-70b-1b-dummy",
        "bench-70b-eagle3-dummy",
        "bench-70b-fp8-1b-dummy",
        "bench-70b-int4-eagle3-dummy",
        "bench-8b-1b-dummy",
        "bench-8b-eagle3-dummy",
        "bench-8b-fp8-1b-dummy",
        "bench-8b-int4-1b-dummy",
        "bench-glm-4.5-air-12-layers-mtp-dummy",
        "bench-glm-4.5-air-mtp-dummy",
        "bench-gpt-oss-120b-dummy",
        "bench-gpt-oss-20b-dummy",
        "bench-qwen3-8b-dflash-dummy",
        "bench-qwen3-8b-dspark-dummy",
        "bench-qwen3-8b-eagle3-dummy",
    ]
    for bundled in bundled_recipes():
        recipe = load_recipe(bundled.name)
        assert recipe == load_recipe(f"{bundled.name}.yaml") == load_recipe(str(bundled.path))
        assert (recipe.draft is None) == (recipe.speculation.method in ("ngram", "mtp"))
        assert ("eagle3" in bundled.name) == (recipe.speculation.method == "eagle3")
        assert len(bundled.description) > 20 and bundled.description.endswith("."), "a sentence"


def test_bench_recipe_finds_its_shapes_beside_itself() -> None:
    recipe = load_recipe("bench-8b-1b-dummy")
    assert recipe.draft is not None
    for model in (recipe.target.model, recipe.draft.model):
        assert (Path(model) / "config.json").is_file()
    rates = recipe.speculation.synthetic_acceptance_rates
    assert rates == pytest.approx([0.8**i for i in range(1, 9)])


def test_no_recipe_is_the_demo() -> None:
    recipe = load_recipe(None)
    assert recipe.draft is not None
    assert (recipe.target.model, recipe.draft.model) == ("demo:target", "demo:draft")
    assert recipe.data is not None and recipe.data.path == "demo:prompts"


def test_target_without_recipe_has_no_draft() -> None:
    recipe = load_recipe(None, {"target.model": "t"})
    assert recipe.draft is None and recipe.data is None
    assert recipe.speculation.method == "none"
    with_draft = load_recipe(None, {"target.model": "t", "draft.model": "d"})
    assert with_draft.draft is not None and with_draft.speculation.method == "draft_model"


def test_draft_without_recipe_replaces_the_demo_draft() -> None:
    recipe = load_recipe(None, {"draft.model": "d"})
    assert recipe.draft is not None
    assert (recipe.target.model, recipe.draft.model) == ("demo:target", "d")


@pytest.mark.parametrize(
    ("written", "method"),
    [
        ("", "none"),
        ("speculation: {method: ngram}", "ngram"),
        ("speculation: {method: none}", "none"),
        ("speculation: {method: draft_model, num_speculative_tokens: 0}", "none"),
        ("draft: {model: d}", "draft_model"),
        ("draft: {model: d}\nspeculation: {method: none}", "none"),
    ],
)
def test_method(write: Write, written: str, method: str) -> None:
    assert load_recipe(write(f"target: {{model: t}}\n{written}")).speculation.method == method


def test_overrides_beat_the_recipe(write: Write) -> None:
    source = write("target: {model: t, revision: abc}\nsampling: {temperature: 0.5, top_k: 3}")
    recipe = load_recipe(source, {"sampling.temperature": 1, "run.compile": True})
    assert (recipe.sampling.temperature, recipe.sampling.top_k) == (1.0, 3)
    assert recipe.run.compile == "on"
    assert recipe.target.revision == "abc"
    other = load_recipe(source, {"target.model": "u"})
    assert other.target.revision is None, "a revision belongs to the model it was written for"
    both = load_recipe(source, {"target.model": "u", "target.revision": "def"})
    assert both.target.revision == "def"


def test_limits_that_meet() -> None:
    ends = {"speculation.ngram_max": 3, "speculation.ngram_min": 3}
    assert load_recipe("demo-ngram", ends).speculation.ngram_min == 3
    rates = {"speculation.acceptance": "synthetic", "speculation.num_speculative_tokens": 2}
    rates |= {"speculation.synthetic_acceptance_rates": [0.5, 0.4]}
    assert load_recipe("demo", rates).speculation.synthetic_acceptance_rates == (0.5, 0.4)
    with pytest.raises(UsageError, match=r"num_speculative_tokens \(3\) rates, has 2"):
        load_recipe("demo", rates | {"speculation.num_speculative_tokens": 3})


def test_overriding_a_null_draft_makes_the_section(write: Write) -> None:
    source = write("target: {model: t}\ndraft: null")
    recipe = load_recipe(source, {"draft.tensor_parallel_size": 1, "draft.model": "d"})
    assert recipe.draft is not None and recipe.draft.model == "d"
    assert load_recipe(source, {"draft.model": "d", "draft": None}).draft is not None


def test_dtype_of_every_model(write: Write) -> None:
    alone = load_recipe(write("target: {model: t}"), {"*.dtype": "float16"})
    assert alone.draft is None and alone.target.dtype == "float16"
    pair = load_recipe(None, {"*.dtype": "float16", "draft.model": "d"})
    assert pair.draft is not None and pair.draft.dtype == "float16"


@pytest.mark.parametrize("word", ["on", "ON", "off", "auto", "'on'", "true", "false", "no"])
def test_switches_survive_yaml(write: Write, word: str) -> None:
    text = f"target: {{model: t}}\nrun: {{compile: {word}, cuda_graphs: {word}}}"
    if word == "ON":
        with pytest.raises(UsageError, match="did you mean on"):
            load_recipe(write(text))
        return
    expected = {"true": "on", "false": "off", "no": "off"}.get(word, word.strip("'"))
    assert load_recipe(write(text)).run.compile == expected


def test_scalars_mean_what_they_look_like(write: Write) -> None:
    text = (
        "target: {model: no, revision: 12:30}\n"
        "sampling: {temperature: 1e-3, top_p: .5, ignore_eos: yes, stop: ['1e-3', on, '']}\n"
        "run: {seed: 012, timeout_s: 5}\n"
    )
    with pytest.raises(UsageError, match=r"sampling.stop\[2\]: should not be empty"):
        load_recipe(write(text))
    recipe = load_recipe(write(text.replace(", ''", "")))
    assert (recipe.target.model, recipe.target.revision) == ("no", "12:30")
    assert (recipe.sampling.temperature, recipe.sampling.top_p) == (0.001, 0.5)
    assert recipe.sampling.ignore_eos is True
    assert recipe.sampling.stop == ("1e-3", "on")
    assert recipe.run.seed == 12


def test_dump_reads_back_equal(write: Write, tmp_path: Path) -> None:
    stops = [
        "1e-3",
        "on",
        "no",
        "012",
        "0o7",
        "~",
        "null",
        "a: b",
        "# c",
        "\n\n",
        "é\t\x1b",
        "12:30",
        "-",
    ]
    overrides: dict[str, object] = {
        "sampling.stop": stops,
        "sampling.temperature": 1e-5,
        "run.compile": "on",
        "target.revision": "1_0",
        "speculation.synthetic_acceptance_rates": [0.1 + 0.2, 1 / 30, 0, 0, 0, 0, 0],
    }
    for source in [None, *(recipe.name for recipe in bundled_recipes())]:
        recipe = load_recipe(source, overrides)
        (tmp_path / "again.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        assert load_recipe(str(tmp_path / "again.yaml")) == recipe


def test_a_dumped_recipe_without_draft_reads_back(tmp_path: Path) -> None:
    recipe = load_recipe(None, {"target.model": "t"})
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(str(tmp_path / "again.yaml")) == recipe


def test_relative_models_like_the_shell_then_beside_the_recipe(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write("target: {model: models/m}\ndraft: {model: org/name}\ndata: {path: p.txt}")
    (tmp_path / "models/m").mkdir(parents=True)
    (tmp_path / "p.txt").write_text("hello")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    recipe = load_recipe(source)
    assert recipe.target.model == str((tmp_path / "models/m").resolve())
    assert recipe.data is not None and Path(recipe.data.path).is_absolute()
    assert recipe.draft is not None and recipe.draft.model == "org/name"
    (here / "models/m").mkdir(parents=True)
    assert load_recipe(source).target.model == "models/m"
    assert load_recipe(source, {"target.model": "nowhere/x"}).target.model == "nowhere/x"


def test_a_file_of_send_times_may_be_beside_the_recipe(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process keeps its name even if a file has the same one."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for name, is_file in (("times.txt", True), ("poisson", False), ("gamma:2", False)):
        (tmp_path / name).write_text("0\n1\n")
        source = write(f"target: {{model: t}}\nload: {{request_rate: [1], arrivals: '{name}'}}\n")
        expected = str((tmp_path / name).resolve()) if is_file else name
        assert load_recipe(source).load.arrivals == expected
    (here / "times.txt").write_text("0\n2\n")
    source = write("target: {model: t}\nload: {request_rate: [1], arrivals: times.txt}\n")
    assert load_recipe(source).load.arrivals == "times.txt"


@pytest.mark.parametrize(
    "value",
    [
        *(
            "demo:draft",
            "",
            "null",
            "1.5",
            " a ",
            "a: b # c",
            "- x",
            "'\"",
            "\U0001f642",
            "\x85\x7f",
        ),
        *(None, True, 4, 0.5, "x " * 200, ["embeddings", "lm_head"], [], {"a": ["\U0001f642"]}),
    ],
)
def test_values_are_written_as_they_are_read(value: object) -> None:
    found = parse_value(value_text(value), "x")
    assert found == value and type(found) is type(value)


def test_bundled_shapes_can_be_named_as_models() -> None:
    recipe = load_recipe(None, {"target.model": "shapes/llama-70b"})
    assert (Path(recipe.target.model) / "config.json").is_file()


def test_a_folder_does_not_hide_a_bundled_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert find_source("demo").suffix == ".yaml"
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.yaml").touch()
    with pytest.raises(UsageError) as caught:
        find_source("run")
    assert caught.value.hint is not None and "run/recipe.yaml" in caught.value.hint


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            {"sampling.temprature": 1},
            "sampling.temprature: unknown key (did you mean sampling.temp",
        ),
        ({"temperature": 1}, "temperature: unknown key (did you mean sampling.temperature?)"),
        ({"samplng.qqqq": 1}, "samplng.qqqq: unknown key (did you mean sampling?)"),
        ({"sampling.stop.x": 1}, "sampling.stop.x: unknown key"),
        ({"": 1}, "unknown key"),
        ({"sampling.temperature": -1.0}, "sampling.temperature: should be greater than or equal"),
        ({"sampling.top_p": float("nan")}, "sampling.top_p: should be a finite number, not NaN"),
        ({"target": 5}, "target: should be a section of keys, not 5"),
        ({"target.model": None}, "target.model: should be text, not null"),
        ({"draft": None, "speculation.method": "draft_model"}, "speculation.method: draft_model n"),
        ({"draft.tensor_parallel_size": 2}, "draft.tensor_parallel_size: draft.tensor_parallel_s"),
        ({"draft": {"tensor_parallel_size": 1}}, "draft.model: is required"),
    ],
)
def test_bad_overrides_name_their_option(overrides: dict[str, object], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe("demo", overrides, dict.fromkeys(overrides, "OPT"))
    assert caught.value.message.startswith(f"OPT: {line}")


def test_a_draft_section_made_by_an_option_alone_blames_the_option(write: Write) -> None:
    source = write("target: {model: t}\ndraft: null")
    with pytest.raises(UsageError, match=r"\A--draft-tp: draft.model: is required\Z"):
        key = "draft.tensor_parallel_size"
        load_recipe(source, {key: 1}, {key: "--draft-tp"})


def test_every_problem_at_once_in_order(write: Write) -> None:
    source = write(
        "target: {model: t, tensor_parallel_size: 4}\n"
        "draft:\n  model: d\n  tensor_parallel_size: 3\n"
        "sampling:\n  temperature: hot\n  top_k: 4.0\n  top_k: 5\n"
        "samplng: {}\n"
    )
    with pytest.raises(UsageError) as caught:
        load_recipe(source, {"run.seed": -1}, {"run.seed": "--seed"})
    lines = caught.value.message.splitlines()
    assert [line.removeprefix(source).partition(": ")[0] for line in lines] == [
        "--seed", ":4", ":6", ":7", ":8", ":9",
    ]  # fmt: skip
    assert (
        "draft.tensor_parallel_size (3) should divide target.tensor_parallel_size (4)" in lines[1]
    )
    assert lines[-1].endswith("samplng: unknown key (did you mean sampling?)")


def test_thousands_of_problems_are_cut(write: Write) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(write("target: {model: t}\n" + "".join(f"k{i}: 1\n" for i in range(500))))
    lines = caught.value.message.splitlines()
    assert len(lines) == 51 and lines[-1] == "and 450 more problems"
