"""The names by which GGUF files, folders, repositories and packages stand for models; tokenizers,
fingerprints and memory of such models; refusals."""

import shutil
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import HfApi
from transformers import AutoTokenizer

from specdec_cli.core.parallel import TensorParallel
from specdec_cli.errors import ExitCode, SetupError, UsageError
from specdec_cli.models.ahead import check_ahead
from specdec_cli.models.description import describe
from specdec_cli.models.fingerprint import fingerprint
from specdec_cli.models.loader import load
from specdec_cli.models.refusals import Unsupported
from specdec_cli.models.resolve import model_place, package_model
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.tokenizer import load_tokenizer
from specdec_cli.recipe import Recipe
from tests.gguf_files import TYPES, save_gguf, tiny_model
from tests.support import CPU, description, save_tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's file, which no test may change."""
    file = tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf"
    return save_gguf(file, "llama", tiny_model("llama"), TYPES.Q8_0)


@pytest.fixture
def file(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(saved, tmp_path / saved.name))


def refusal(place: Path | str, file: str | None = None) -> SetupError:
    """The error of loading; checks exit code 5, one line, and a hint."""
    with pytest.raises(SetupError) as caught:
        found = describe(ModelSpec("target", str(place), None, "auto", "auto", file=file), CPU)
        load(found, CPU)
    problem = caught.value
    assert problem.code == ExitCode.ENVIRONMENT and problem.hint and "\n" not in problem.message
    return problem


# Paths.


def test_a_folder_with_one_file_is_that_model(file: Path) -> None:
    assert model_place(str(file), None) == file
    assert model_place(str(file.parent), None) == file


def test_several_files_are_listed_and_one_chosen(file: Path) -> None:
    shutil.copy(file, file.with_name("other.gguf"))
    problem = refusal(file.parent)
    assert "2 GGUF files: other.gguf, tiny-Q8_0.gguf" in problem.message
    assert "file: other.gguf" in (problem.hint or "")
    assert model_place(str(file.parent), None, "tiny-Q8_0.gguf") == file
    assert "no file third.gguf" in refusal(file.parent, "third.gguf").message
    assert "is itself a file" in refusal(file, "third.gguf").message


def test_a_folder_for_transformers_stays_one(file: Path) -> None:
    """Naming a file changes that; a config beside GGUF files alone does not."""
    (file.parent / "config.json").write_text("{}")
    assert model_place(str(file.parent), None) == file
    save_tiny(file.parent, "llama")
    assert model_place(str(file.parent), None) == file.parent
    assert model_place(str(file.parent), None, file.name) == file


def test_a_missing_file(tmp_path: Path) -> None:
    assert "no such model file" in refusal(tmp_path / "m.gguf").message
    assert "no such model file" in refusal("m.gguf").message


# Repositories.


@pytest.mark.parametrize("is_online", [True, False])
def test_only_the_files_of_one_model_are_downloaded(
    is_online: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    repository = ["README.md", "config.json", *parts, "q/other.gguf"]

    def download(name: str, *, revision: str, **patterns: list[str]) -> str:
        for found in huggingface_hub.utils.filter_repo_objects(repository, **patterns):
            (tmp_path / found).parent.mkdir(exist_ok=True)
            (tmp_path / found).touch()
        return str(tmp_path)

    def listed(api: Any, name: str, *, revision: str) -> list[str]:
        if not is_online:
            raise OSError("offline")
        return repository

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(HfApi, "list_repo_files", listed)
    with pytest.raises(SetupError, match="no file nonesuch"):
        model_place("owner/name", "v2", "nonesuch.gguf")
    if is_online:
        with pytest.raises(SetupError, match=r"2 GGUF files: m-00001-of-00002.gguf, q/other.gguf"):
            model_place("owner/name", "v2")
        repository.remove("q/other.gguf")
        assert model_place("owner/name", "v2") == tmp_path / parts[0]
    assert model_place("owner/name", "v2", parts[0]) == tmp_path / parts[0]
    found = {str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file()}
    assert found == {*parts, "config.json"} - ({"config.json"} if not is_online else set())


# Packages.


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages. Importing one of them would fail."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def install(site: Path, name: str, files: list[Path], listed: bool = True) -> Path:
    """Install a package with these files. listed: its RECORD names them."""
    folder = site / name
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    for file in files:
        shutil.copy(file, folder)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    rows = sorted(p.relative_to(site).as_posix() for p in folder.iterdir()) if listed else []
    (info / "RECORD").write_text("".join(f"{row},,\n" for row in rows))
    return folder


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", ["tiny_gguf_model", "tiny-gguf-model", "Tiny.GGUF.model"])
def test_the_model_of_a_package(name: str, listed: bool, site: Path, saved: Path) -> None:
    folder = install(site, "tiny_gguf_model", [saved], listed)
    if not listed and name == "Tiny.GGUF.model":  # a package's name alone leads to no module
        with pytest.raises(SetupError, match="ships no model"):
            package_model(f"package:{name}", None)
        return
    assert model_place(f"package:{name}", None) == folder / saved.name
    assert "tiny_gguf_model" not in sys.modules


def test_a_package_with_a_model_folder(site: Path, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "llama")
    folder = install(site, "tiny_folder_model", sorted(model.iterdir()))
    assert model_place("package:tiny_folder_model", None) == folder
    (folder / "extra.gguf").touch()
    shutil.rmtree(site / "tiny_folder_model-1.0.dist-info")
    assert "ships 2 models" in refusal("package:tiny_folder_model").message


def test_packages_without_one_model(site: Path, file: Path) -> None:
    assert "no Python package nonesuch_model" in refusal("package:nonesuch_model").message
    assert "does not name a package" in refusal("package:../x").message
    install(site, "empty_model", [])
    assert "ships no model" in refusal("package:empty_model").message
    other = Path(shutil.copy(file, file.with_name("other.gguf")))
    folder = install(site, "two_models", [file, other])
    assert "2 GGUF files: other.gguf, tiny-Q8_0.gguf" in refusal("package:two_models").message
    assert model_place("package:two_models", None, "other.gguf") == folder / "other.gguf"


# Refusals of models.


KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "falcon"}, 'GGUF file of architecture "falcon"'),
    "layers": ({"llama.block_count": 2**31}, "num_hidden_layers is 2147483648"),
    "more-layers": ({"llama.block_count": 3}, "num_hidden_layers is 3, but the weights have 2"),
    "no-heads": ({"llama.attention.head_count": 0}, "num_attention_heads is 0"),
    "heads-are-text": ({"llama.attention.head_count": "many"}, 'num_attention_heads is "many"'),
    "width": ({"llama.embedding_length": 128}, "has shape [97, 64] in the weights"),
    "vocabulary": ({"llama.vocab_size": 2**31}, "has shape [97, 64] in the weights"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps is NaN"),
    "part-of-heads": ({"llama.attention.key_length": 8}, "attention.key_length is 8"),
    "experts": ({"llama.expert_count": 8}, "reads no experts"),
    "layers-are-a-list": ({"llama.block_count": [1, 2]}, "llama.block_count is [1, 2]"),
    "size-is-a-list": ({"llama.attention.key_length": [16]}, "attention.key_length is [16]"),
    "end-is-a-list": ({"tokenizer.ggml.eos_token_id": [1, 2]}, "ggml.eos_token_id is [1, 2]"),
    "turn-s-end-is-a-list": ({"tokenizer.ggml.eot_token_id": [1]}, "ggml.eot_token_id is [1]"),
    "message-s-end-is-text": ({"tokenizer.ggml.eom_token_id": "x"}, 'ggml.eom_token_id is "x"'),
    "turn-s-end-is-no-token": ({"tokenizer.ggml.eot_token_id": 97}, "ggml.eot_token_id is 97"),
    "begin-is-no-token": ({"tokenizer.ggml.bos_token_id": 97}, "ggml.bos_token_id is 97"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, 'scaled as "yarn"'),
}


@pytest.mark.parametrize("case", KEYS)
def test_keys_that_no_model_has(case: str, tmp_path: Path) -> None:
    more, told = KEYS[case]
    file = save_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), more=more)
    assert told in refusal(file).message


def test_a_cut_file(file: Path) -> None:
    content = file.read_bytes()
    for kept in (0, 100, len(content) // 2, len(content) - 40):
        file.write_bytes(content[:kept])
        assert str(file) in refusal(file).message


def test_heads_are_checked_before_ranks_start(file: Path) -> None:
    recipe = Recipe.model_validate({"target": {"model": str(file), "tensor_parallel_size": 3}})
    with pytest.raises(Unsupported, match="4 attention heads"):
        check_ahead(recipe)


# What is known of a model.


def test_memory_is_that_of_plain_numbers(saved: Path) -> None:
    model = tiny_model("llama")
    count = sum(p.numel() for p in model.parameters())
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        found = describe(ModelSpec("target", str(saved), None, dtype, "auto"), CPU)
        assert found.weight_bytes == count * size
        held = load(found, CPU).parameters()
        assert sum(p.numel() * p.element_size() for p in held) == count * size
    assert found.notes == {"weights": "dequantised from GGUF (Q8_0, F32)"}


def test_a_ranks_part_is_cut_from_the_file(saved: Path) -> None:
    whole = dict(load(description(saved), CPU).named_parameters())
    for rank in range(2):
        ours = description(saved, parallel=TensorParallel(rank, 2, None, CPU))
        for name, value in load(ours, CPU).named_parameters():
            part = ours.shards.parts.get(name)
            want = whole[name] if part is None else part.of(whole[name])
            assert torch.equal(value, want), name
            assert part is None or value.shape != whole[name].shape


def test_dtype_on_a_gpu_is_the_files(tmp_path: Path) -> None:
    for kind, dtype in (("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.bfloat16)):
        file = save_gguf(tmp_path / f"{kind}.gguf", "llama", tiny_model("llama"), TYPES[kind])
        assert describe(_spec(file), torch.device("cuda")).dtype == dtype


def _spec(file: Path) -> ModelSpec:
    return ModelSpec("target", str(file), None, "auto", "auto")


def test_fingerprints_cover_the_file(file: Path) -> None:
    first, shape = fingerprint(file, "auto"), fingerprint(file, "dummy")
    copied = Path(shutil.copy(file, file.with_name("copy.gguf")))
    assert fingerprint(copied, "auto") == first
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert fingerprint(file, "auto") != first and fingerprint(file, "dummy") == shape


# Tokenizers.


def vocabulary() -> dict[str, Any]:
    """A byte-level vocabulary with merges and special tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special = ["<|pad|>", "<|start|>", "<|end|>"]
    letters = sorted(bytes_to_unicode().values())
    merges = ["h e", "l l", "he ll", "Ġ w"]
    tokens = [*special, *letters, *(m.replace(" ", "") for m in merges), "<think>"]
    kinds = [3] * len(special) + [1] * (len(letters) + len(merges)) + [4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m.content }}<|end|>"
        "{% endfor %}<|start|>",
    }


TEXTS = ["hello world", "  two  spaces\n", "<|start|>hell<|end|>", "<think>héllo 漢字", ""]


def test_tokenizer_as_transformers_loads_it(tmp_path: Path) -> None:
    if not hasattr(transformers.integrations.gguf, "convert_gguf_tokenizer"):
        pytest.skip("this version of transformers adds and loses tokens")
    values = vocabulary()
    for more in ({}, {"tokenizer.ggml.add_bos_token": True}):
        file = tmp_path / f"{len(more)}.gguf"
        save_gguf(file, "llama", tiny_model("llama", vocab_size=264), more=values | more)
        tokenizer = load_tokenizer(file, "m", 264, False)
        oracle = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
        # transformers adds <|endoftext|>, which the file lacks.
        assert oracle.get_vocab() == tokenizer.vocabulary() | {"<|endoftext|>": 264}
        for text in TEXTS:
            for special in (True, False):
                ids = tokenizer.encode(text, add_special_tokens=special)
                assert ids == oracle(text, add_special_tokens=special).input_ids
            assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("more", [{}, {"tokenizer.ggml.add_bos_token": True}], ids=["", "bos"])
def test_tokenizer_and_special_ids_are_the_files(more: dict[str, Any], tmp_path: Path) -> None:
    values = vocabulary() | more
    size = len(values["tokenizer.ggml.tokens"])
    model = tiny_model("llama", vocab_size=size)
    file = save_gguf(tmp_path / "m.gguf", "llama", model, more=values | {"llama.vocab_size": None})
    found = describe(_spec(file), CPU)
    assert (found.vocab_size, found.eos_ids) == (size, {2, 0})
    tokenizer = load_tokenizer(file, "m", size, False)
    number = values["tokenizer.ggml.tokens"].index
    words = [number(part) for part in ("<|start|>", "hell", "o", "Ġw", "<|end|>", "<think>", "h")]
    ids = tokenizer.encode("<|start|>hello w<|end|><think>h")
    assert ids == [1] * bool(more) + words
    assert tokenizer.decode(ids) == "hello w<think>h"
    assert tokenizer.decode(tokenizer.encode("  hello ")) == "  hello "
    assert tokenizer.render([{"role": "user", "content": "hi"}]) == "<|start|>hi<|end|><|start|>"


def test_templates_with_names(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "tokenizer.chat_templates": ["rag", "tool_use"],
        "tokenizer.chat_template.rag": "rag: {{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "{{ tools[0] }}: {{ messages[0].content }}",
    }
    values = vocabulary() | more
    size, ask = len(values["tokenizer.ggml.tokens"]), [{"role": "user", "content": "hi"}]
    file = save_gguf(
        tmp_path / "m.gguf", "llama", tiny_model("llama", vocab_size=size), more=values
    )
    tokenizer = load_tokenizer(file, "m", size, False)
    assert tokenizer.render(ask) == "<|start|>hi<|end|><|start|>"
    assert tokenizer.render(ask, {"chat_template": "rag"}) == "rag: hi"
    with pytest.raises(UsageError, match="no chat template") as caught:
        tokenizer.render(ask, {"chat_template": "nonesuch"})
    assert caught.value.hint == "its names are default, rag, tool_use"
    values["tokenizer.chat_template"] = None
    save_gguf(file, "llama", tiny_model("llama", vocab_size=size), more=values)
    tokenizer = load_tokenizer(file, "m", size, False)
    assert tokenizer.render(ask, {"chat_template": "rag"}) == "rag: hi"


WIDE = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"]


def wide_vocabulary(kinds: list[int]) -> dict[str, Any]:
    """A vocabulary with special tokens outside the byte-level alphabet, as in DeepSeek's files. The
    first two are its BOS and EOS tokens."""
    values = vocabulary()
    size = len(values["tokenizer.ggml.tokens"])
    values["tokenizer.ggml.tokens"] += WIDE
    values["tokenizer.ggml.token_type"] += kinds
    return values | {
        "tokenizer.ggml.bos_token_id": size,
        "tokenizer.ggml.eos_token_id": size + 1,
        "tokenizer.ggml.add_bos_token": True,
    }


def test_special_tokens_outside_the_byte_level_alphabet_keep_their_ids(tmp_path: Path) -> None:
    values = wide_vocabulary([3, 3, 4])
    tokens = values["tokenizer.ggml.tokens"]
    begin, end, user = range(len(tokens) - 3, len(tokens))
    model = tiny_model("llama", vocab_size=len(tokens))
    file = save_gguf(tmp_path / "m.gguf", "llama", model, more=values)
    tokenizer = load_tokenizer(file, "m", len(tokens), False)
    assert tokenizer.vocabulary() == {token: i for i, token in enumerate(tokens)}
    assert tokenizer.end_token == (end, WIDE[1])
    ids = tokenizer.encode("<｜User｜>hell<think><｜end▁of▁sentence｜>")
    assert ids == [begin, user, *map(tokens.index, ("hell", "<think>")), end]
    assert tokenizer.decode(ids) == "<｜User｜>hell<think>"
    assert max(tokenizer.encode("<|endoftext|>")) <= end, "the file has no such token"


@pytest.mark.parametrize("kinds", [[1, 4], [4, 1]], ids=str)
def test_two_spaces_may_be_two_tokens(kinds: list[int], tmp_path: Path) -> None:
    """One is spelled by its bytes. Texts have the other, which is never split."""
    values = vocabulary()
    values["tokenizer.ggml.tokens"] += ["ĠĠ", "  "] if kinds[0] == 1 else ["  ", "ĠĠ"]
    values["tokenizer.ggml.token_type"] += kinds
    values["tokenizer.ggml.merges"] += ["Ġ Ġ"]
    assert pieces(values, "hell  o", tmp_path) == ["hell", "  ", "o"]
    tokenizer = load_tokenizer(tmp_path / "m.gguf", "m", 266, False)
    tokens = values["tokenizer.ggml.tokens"]
    assert tokenizer.vocabulary() == {token: i for i, token in enumerate(tokens)}
    assert tokenizer.decode([tokens.index("ĠĠ"), tokens.index("  ")]) == " " * 4


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_a_file_whose_special_token_would_get_another_id_is_refused(
    name: str, tmp_path: Path
) -> None:
    """A token that is marked as an ordinary one is spelled by its bytes in texts."""
    values = wide_vocabulary([1, 3, 3] if name == "bos_token" else [3, 1, 3])
    size = len(values["tokenizer.ggml.tokens"])
    model = tiny_model("llama", vocab_size=size)
    file = save_gguf(tmp_path / "m.gguf", "llama", model, more=values)
    with pytest.raises(SetupError, match=f"cannot load the tokenizer of m: its {name} ") as caught:
        load_tokenizer(file, "m", size, False)
    assert caught.value.message.endswith(f"not {values[f'tokenizer.ggml.{name}_id']}")


@pytest.mark.parametrize(
    ("kind", "said", "begins"),
    [
        ("llama-bpe", None, True),
        ("tekken", None, True),
        ("pixtral", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
        ("qwen2", True, True),
        ("smollm", None, False),
    ],
)
def test_the_first_token_is_that_of_the_kind_unless_the_file_says_otherwise(
    kind: str, said: bool | None, begins: bool, tmp_path: Path
) -> None:
    if not hasattr(transformers.integrations.gguf, "convert_gguf_tokenizer"):
        pytest.skip("this version of transformers refuses these kinds")
    more: dict[str, Any] = {"tokenizer.ggml.pre": kind, "tokenizer.ggml.bos_token_id": 1}
    if said is not None:
        more["tokenizer.ggml.add_bos_token"] = said
    size = len(vocabulary()["tokenizer.ggml.tokens"])
    model = tiny_model("llama", vocab_size=size)
    file = save_gguf(tmp_path / "m.gguf", "llama", model, more=vocabulary() | more)
    ids = load_tokenizer(file, "m", size, False).encode("hello w")
    assert (ids[0] == 1) == begins and len(ids) == 3 + begins


@pytest.mark.parametrize("kind", ["smollm", "starcoder", "command-r", "gpt-2", "qwen2"])
def test_digits_are_cut_as_the_kind_says(kind: str, tmp_path: Path) -> None:
    """GPT-2's rule leaves one of two spaces to the number, the others leave none."""
    values = vocabulary() | {"tokenizer.ggml.pre": kind}
    values["tokenizer.ggml.tokens"] += ["ĠĠ", "12"]
    values["tokenizer.ggml.token_type"] += [1, 1]
    values["tokenizer.ggml.merges"] += ["Ġ Ġ", "1 2"]
    found = pieces(values, "h  12", tmp_path)
    apart = {"gpt-2": ["Ġ", "Ġ", "12"], "qwen2": ["Ġ", "Ġ", "1", "2"]}
    assert found == ["h", *apart.get(kind, ["ĠĠ", "1", "2"])]


@pytest.mark.parametrize("kind", ["llama-bpe", "falcon3", "tekken", "qwen2", "gpt-2"])
def test_a_piece_that_is_a_token_needs_no_merges(kind: str, tmp_path: Path) -> None:
    """Llama 3 has tokens that no merge makes."""
    values = vocabulary() | {"tokenizer.ggml.pre": kind}
    values["tokenizer.ggml.tokens"] += ["hellhell"]
    values["tokenizer.ggml.token_type"] += [1]
    found = pieces(values, "hellhell", tmp_path)
    is_whole = kind in ("llama-bpe", "falcon3", "tekken")
    assert found == (["<|start|>", "hellhell"] if is_whole else ["hell", "hell"])


def pieces(values: dict[str, Any], text: str, folder: Path) -> list[str]:
    """The tokens of a text, by a file with these values."""
    if not hasattr(transformers.integrations.gguf, "convert_gguf_tokenizer"):
        pytest.skip("this version of transformers refuses some of these kinds")
    tokens = values["tokenizer.ggml.tokens"]
    model = tiny_model("llama", vocab_size=len(tokens))
    file = save_gguf(folder / "m.gguf", "llama", model, more=values)
    return [tokens[i] for i in load_tokenizer(file, "m", len(tokens), False).encode(text)]


def sentence_pieces() -> dict[str, Any]:
    """A vocabulary of pieces, with the bytes of other characters."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", *"helo", "he", "ll", "hell", "hello", "▁hello"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": special + words,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(words))],
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.mark.parametrize(
    ("said", "first"), [(None, "▁hello"), (True, "▁hello"), (False, "hello")], ids=str
)
def test_a_space_before_the_first_word_is_added_unless_the_file_says_otherwise(
    said: bool | None, first: str, tmp_path: Path
) -> None:
    values = sentence_pieces()
    if said is not None:
        values["tokenizer.ggml.add_space_prefix"] = said
    assert pieces(values, "hello hello", tmp_path) == ["<s>", first, "▁hello"]
    tokenizer = load_tokenizer(tmp_path / "m.gguf", "m", 269, False)
    for text in ("hello", "hello  hello ", "é漢 hello\n", "\n hello", " hello", "  hello", " "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # As in llama.cpp, a text's own space is one more, and text after a special token begins anew.
    more = [] if said is False else ["▁"]
    assert pieces(values, " hello", tmp_path) == ["<s>", *more, "▁hello"]
    assert pieces(values, "</s>hello</s> hello", tmp_path) == [
        *("<s>", "</s>", first, "</s>", *more, "▁hello")
    ]


@pytest.mark.parametrize("name", ["Phi 3 Mini", "Phi-3-mini", "Phi3", "phi3.5", None], ids=str)
def test_white_space_after_phi_3_s_tokens_is_left_out(name: str | None, tmp_path: Path) -> None:
    """As in llama.cpp, which knows these models by their names."""
    values = sentence_pieces() | {"general.name": name}
    values["tokenizer.ggml.tokens"] += ["<|user|>", "<|end|>"]
    values["tokenizer.ggml.token_type"] += [3, 4]
    values["tokenizer.ggml.scores"] += [-1000.0] * 2
    found = pieces(values, "<|user|>\nhello<|end|> \n</s> hello<s> hello", tmp_path)
    if name in (None, "Phi 3 Mini"):
        assert found[1:4] == ["<|user|>", "▁", "<0x0A>"]
    else:
        user = ["<|user|>", "▁hello", "<|end|>", "</s>", "▁hello"]
        assert found == ["<s>", *user, "<s>", "▁", "▁hello"]


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"tokenizer.ggml.tokens": None}, "there is none in the GGUF file"),
    "twice": ({"tokenizer.ggml.tokens": ["a"] * 97}, "a token twice"),
    "numbers": ({"tokenizer.ggml.tokens": [1, 2]}, "there is none in the GGUF file"),
    "kinds": ({"tokenizer.ggml.token_type": [1]}, "token_type is not a list of"),
    "eos": ({"tokenizer.ggml.eos_token_id": 999}, "eos_token_id is 999"),
    "kind": ({"tokenizer.ggml.model": "nonesuch"}, 'its kind is "nonesuch"'),
    "cut": ({"tokenizer.ggml.pre": "nonesuch"}, 'its pre-tokenizer "nonesuch" is not supported'),
    "merges": ({"tokenizer.ggml.merges": ["a"]}, "cannot load the tokenizer"),
    "no-merges": ({"tokenizer.ggml.merges": None}, "cannot load the tokenizer"),
    "long": ({"tokenizer.ggml.tokens": ["a" * 5000, "b"]}, "longest token has 5000 characters"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_damaged_tokenizer_is_one_line(case: str, tmp_path: Path) -> None:
    more, told = FAULTS[case]
    values = vocabulary() | more
    file = save_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama"), more=values)
    with pytest.raises(SetupError) as caught:
        load_tokenizer(file, "m", 97, False)
    assert told in caught.value.message and caught.value.message.isprintable()
