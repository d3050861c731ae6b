"""Facts from a model's own files besides weights: context length, second save, special tokens.

transformers' own reading is the judge where there is one.
"""

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from specdec_cli.core.detokenize import StopFinder, text_before
from specdec_cli.core.logits_processors import LogitsProcessors
from specdec_cli.core.types import SamplingParams
from specdec_cli.engine.plan import plan
from specdec_cli.errors import SetupError, UsageError
from specdec_cli.experiment.preparing import looped, unlisted_end
from specdec_cli.models.config import eos_ids_of, max_len_of
from specdec_cli.models.resolve import model_place
from specdec_cli.models.tokenizer import PretrainedTokenizer, load_tokenizer
from specdec_cli.models.weights import open_checkpoint, tensor_names
from specdec_cli.recipe import load_recipe
from tests.support import CPU, save_tiny

ROPE = {"rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "yarn", "factor": 2.5}, 160),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "linear", "factor": float("inf")}, 64),
        ({"rope_type": "linear", "factor": float("nan")}, 64),
        ({"rope_type": "linear", "factor": True}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "64"}, 64),
        ({"rope_type": "dynamic", "factor": 4.0}, 64),
        (
            {
                **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
                **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8},
            },
            64,
        ),
    ],
    ids=str,
)
def test_the_context_follows_the_factor_of_the_positions(rope: dict[str, Any], length: int) -> None:
    config = LlamaConfig(max_position_embeddings=64)
    config.rope_parameters = rope | ROPE
    assert max_len_of(config) == length


def test_layers_with_embeddings_of_their_own_keep_the_config_s_length() -> None:
    rope = {"rope_type": "linear", "factor": 8.0}
    kinds = {"full_attention": rope | ROPE, "sliding_attention": ROPE}
    config = LlamaConfig(max_position_embeddings=64)
    config.rope_parameters = kinds
    assert max_len_of(config) == 64


@pytest.mark.parametrize(("asked", "is_right"), [(256, True), (257, False), (5000, False)])
def test_a_longer_context_than_the_target_s_is_an_error(
    tmp_path: Path, asked: int, is_right: bool
) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    folder = save_tiny(tmp_path, "llama", max_position_embeddings=64, rope_parameters=rope | ROPE)
    keys = {"target.model": str(folder), "speculation.method": "ngram", "run.device": "cpu"}
    keys |= {"target.load_format": "dummy", "cache.max_model_len": asked}
    recipe = load_recipe("demo-ngram", keys)
    if is_right:
        assert plan(recipe).max_model_len == asked
    else:
        with pytest.raises(UsageError, match=f"cache.max_model_len: {asked} exceeds .* of 256 "):
            plan(recipe)


def two_saves(folder: Path, *, lacks_a_shard: bool) -> tuple[Path, Path]:
    """A folder with the shards and index of one model and the single file of another, and that."""
    old, new = (
        save_tiny(folder / "old", "llama", seed=1),
        save_tiny(folder / "new", "llama", seed=2),
    )
    both = folder / "both"
    AutoModelForCausalLM.from_pretrained(old).save_pretrained(both, max_shard_size="40KB")
    assert (both / "model.safetensors.index.json").exists()
    shutil.copy(new / "model.safetensors", both)
    if lacks_a_shard:
        next(both.glob("model-0*.safetensors")).unlink()
    return both, new


@pytest.mark.parametrize("lacks_a_shard", [False, True])
def test_a_single_file_counts_before_the_index_of_another_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lacks_a_shard: bool
) -> None:
    both, new = two_saves(tmp_path, lacks_a_shard=lacks_a_shard)
    want = load_file(new / "model.safetensors")
    with caplog.at_level(logging.WARNING), open_checkpoint(both, False) as found:
        assert found.keys() == want.keys() == set(tensor_names(both))
        assert all(torch.equal(read(), want[name]) for name, read in found.items())
    assert [record.message.count("model.safetensors.index.json") for record in caplog.records] == [
        1
    ]
    theirs = AutoModelForCausalLM.from_pretrained(both).state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in want.items())


def test_a_missing_shard_without_a_single_file_stays_an_error(tmp_path: Path) -> None:
    both, _ = two_saves(tmp_path, lacks_a_shard=True)
    (both / "model.safetensors").unlink()
    with pytest.raises(SetupError, match="lacks 1 of"), open_checkpoint(both, False):
        pass


def test_one_save_is_no_reason_to_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path, False) as found:
        assert list(found) == ["a"]
    assert not caplog.records


WORDS = ["<unk>", "<|end|>", "<|tool|>", "one", "two", "three", "<b>"]
ONE, TWO, THREE, END, TOOL = 3, 4, 5, 1, 2


@pytest.fixture
def tokenizer(tmp_path: Path) -> PretrainedTokenizer:
    """Words and spaces, and two special tokens, of which one is only an added one."""
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    inner.add_special_tokens(["<|tool|>"])
    theirs = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<|end|>")
    return PretrainedTokenizer(theirs, "words")


@pytest.mark.parametrize(
    ("stop", "tokens", "count", "text"),
    [
        (("<|tool|>",), [ONE, TOOL, TWO], 2, "one"),
        (("<|end|>",), [ONE, TWO, END], 3, "one two"),
        (("two <|tool|>",), [ONE, TWO, TOOL, THREE], 3, "one"),
        (("<|tool|>", "two"), [ONE, TWO, TOOL], 2, "one"),
        (("two", "<|tool|>"), [END, ONE, TOOL], 3, "one"),
        (("one two",), [ONE, TOOL, TWO], 3, ""),  # special tokens are none of an ordinary text
        (("<|tool|> two",), [TOOL, ONE, TWO], None, None),
    ],
)
def test_stop_strings_find_special_tokens(
    tokenizer: PretrainedTokenizer,
    stop: tuple[str, ...],
    tokens: list[int],
    count: int | None,
    text: str | None,
) -> None:
    decoder = tokenizer.finding(stop)
    for lengths in ([len(tokens)], [1] * len(tokens)):
        finder, parts, found, read = StopFinder(decoder, [TWO], stop), iter(tokens), None, 0
        for length in lengths:
            part = [next(parts) for _ in range(length)]
            at = finder.feed(part)
            found = read + at if found is None and at is not None else found
            read += length
        assert found == count
    if count is not None:
        assert text_before(tokenizer, [TWO], tokens[:count], stop).strip() == text


def test_texts_without_special_tokens_are_searched_as_they_are_shown(
    tokenizer: PretrainedTokenizer,
) -> None:
    assert tokenizer.finding(("one", "tool")) is tokenizer
    assert json.dumps(tokenizer.decode([ONE, TOOL])) == '"one"'


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2847\n"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json"])
def test_a_tokenizer_that_is_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(LFS)
    with pytest.raises(SetupError, match=f"{name} is a Git LFS pointer") as told:
        load_tokenizer(tmp_path, "m", 97, False)
    assert "git lfs pull" in (told.value.hint or "")


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin", None])
def test_an_adapter_is_no_model(
    tmp_path: Path, weights: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    if weights is not None:
        (tmp_path / weights).touch()
    for has_config in (False, True):
        if has_config:  # of the model that it was trained on
            (tmp_path / "config.json").write_text("{}")
            (tmp_path / "training_args.bin").touch()
        with pytest.raises(SetupError, match="is an adapter") as told:
            model_place(str(tmp_path), None, None)
        assert "merge it into the model that it" in (told.value.hint or "")
        (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/a"}')
        with pytest.raises(SetupError, match="is an adapter") as told:
            model_place(str(tmp_path), None, None)
        assert told.value.hint == "merge it into org/a, and give that folder"
        (tmp_path / "adapter_config.json").write_text("[")
    (tmp_path / "model.safetensors").touch()
    assert model_place(str(tmp_path), None, None) == tmp_path
    assert "beside its weights (adapter_config.json), which is not applied" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False, "temperature": 0.6, "top_p": 0.9},
        {"num_beams": 1, "early_stopping": True, "length_penalty": 2.0},
        {"temperature": "warm"},
        {"cache_implementation": "none of these"},
        {},
    ],
    ids=str,
)
def test_settings_of_generation_that_are_not_used_do_no_harm(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    config = LlamaConfig(eos_token_id=7)
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert eos_ids_of(config, tmp_path) == {7}
    ends = settings | {"eos_token_id": [3, 5]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    assert eos_ids_of(config, tmp_path) == {3, 5}


@pytest.mark.parametrize(("stored", "want"), [(-1, set()), ([-1, 5], {5}), (None, set())])
def test_a_negative_end_token_is_none(tmp_path: Path, stored: object, want: set[int]) -> None:
    """As an index it would name the last id of the vocabulary, which `min_new_tokens` forbids."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stored}))
    ends = eos_ids_of(LlamaConfig(eos_token_id=-1), tmp_path)
    assert ends == want
    processors = LogitsProcessors.of(SamplingParams(min_new_tokens=5), ends, 10, CPU)
    assert processors is not None and processors.ends.nonzero().flatten().tolist() == list(want)


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"eos_token_id": "1"}', '{"eos_token_id": [true]}']
)
def test_settings_of_generation_that_cannot_be_read_are_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(SetupError, match=r"generation_config\.json"):
        eos_ids_of(LlamaConfig(), tmp_path)


@pytest.mark.parametrize(
    ("eos_ids", "reasons", "ignores", "told"),
    [
        ({9}, ["length", "eos"], False, "1 of 2 texts reached"),
        (set(), ["length", "length"], False, "2 of 2 texts reached"),
        ({END, 9}, ["length"], False, None),
        ({9}, ["eos", "stop", "error"], False, None),
        ({9}, ["length"], True, None),
    ],
)
def test_an_end_token_that_ends_no_text_is_a_warning(
    tokenizer: PretrainedTokenizer,
    eos_ids: set[int],
    reasons: list[str],
    ignores: bool,
    told: str | None,
) -> None:
    params = SimpleNamespace(ignore_eos=ignores)
    plan = SimpleNamespace(tokenizer=tokenizer, params=params, eos_ids=eos_ids)
    job: Any = SimpleNamespace(plan=plan)
    found = unlisted_end(job, [SimpleNamespace(finish_reason=r) for r in reasons])  # type: ignore[arg-type]
    assert len(found) == (told is not None)
    for notice in found:
        assert told is not None and told in notice.message and "<|end|> (id 1)" in notice.message


@pytest.mark.parametrize(
    ("ids", "is_loop"),
    [
        ([7] * 32, True),
        ([1, 2, 3, *[4, 5, 6, 7, 8] * 8], True),
        ([*range(40), *range(40), *range(40), *range(40)], True),
        ([7] * 31, False),
        ([*range(40), *range(40), *range(40)], False),
        ([*[4, 5, 6, 7] * 12, 9], False),
        ([], False),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_texts_that_end_in_a_loop_are_a_warning(
    ids: list[int], is_loop: bool, temperature: float
) -> None:
    def told(reason: str, model: str = "mine", others: int = 0, **params: Any) -> list[str]:
        usual = {"ignore_eos": False, "temperature": temperature, "repetition_penalty": 1.0}
        plan: Any = SimpleNamespace(
            params=SimpleNamespace(**(usual | params)),
            random_roles=(),
            recipe=SimpleNamespace(target=SimpleNamespace(model=model)),
        )
        output: Any = SimpleNamespace(finish_reason=reason, token_ids=ids)
        whole: Any = SimpleNamespace(finish_reason="eos", token_ids=ids)
        job: Any = SimpleNamespace(plan=plan)
        return [notice.message for notice in looped(job, [output, output, *[whole] * others])]

    assert [one[:21] for one in told("length")] == ["2 of 2 texts end in a"] * is_loop
    for message in told("length"):
        assert ("--temperature" in message) == (temperature == 0)
    for tried, more in ((1.0, 1.2), (1.1, 1.2), (1.2, 1.3), (1.5, 1.6)):
        for message in told("length", repetition_penalty=tried):
            assert message.endswith(f"--set sampling.repetition_penalty={more}"), (
                "not the same again"
            )
    is_greedy = temperature == 0
    assert ["demo-sampled" in one for one in told("length", "demo:target")] == [is_greedy] * is_loop
    assert [" 2 of 5 " in f" {one}" for one in told("length", others=3)] == (
        [True] * (is_loop and is_greedy)
    ), "few sampled texts may loop"
    assert told("eos") == told("length", ignore_eos=True) == []
