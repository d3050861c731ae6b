"""Tokenizers that panic, take minutes or multiply text: one line and exit code 5."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specdec_cli.errors import ExitCode, SetupError
from specdec_cli.models import guards
from specdec_cli.models.tokenizer import load_tokenizer


def saved(folder: Path, **steps: Any) -> Path:
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    for name, step in steps.items():
        setattr(inner, name, step)
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(folder)
    return folder


def refusal(folder: Path, text: str, ids: tuple[int, ...] = ()) -> str:
    """The one line of the error from loading or using the tokenizer."""
    with pytest.raises(SetupError) as caught:
        tokenizer = load_tokenizer(folder, "m", 97, is_dummy=False)
        tokenizer.encode(text)
        tokenizer.decode(ids)
    assert caught.value.code == ExitCode.ENVIRONMENT and caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value.message


def explodes(pattern: str = r"(a+)+$") -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def test_a_panic_is_an_error_of_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUST_BACKTRACE", "0")  # it takes seconds
    said = refusal(saved(tmp_path, pre_tokenizer=explodes()), "a" * 40 + "b")
    assert said.startswith("the tokenizer of m fails: ") and "retry-limit" in said
    assert capfd.readouterr().err == ""


def test_what_native_code_prints_is_no_result(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """tokenizers prints the names of fields that it does not know."""
    file = saved(tmp_path) / "tokenizer_config.json"
    unknown = {"added_tokens_decoder": {"0": {"no\x1bpe": 1}}}
    file.write_text(json.dumps(json.loads(file.read_text()) | unknown))
    load_tokenizer(tmp_path, "m", 97, is_dummy=False)
    out, err = capfd.readouterr()
    assert out == "" and err == "Ignored unknown kwarg option no\\x1bpe\n"


@pytest.mark.parametrize("is_panicking", [False, True])
def test_only_the_lines_of_a_panic_are_dropped(
    is_panicking: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    class PanicException(BaseException):
        pass

    def others() -> None:
        os.write(2, b"a line of another thread\n")

    with suppress(PanicException), guards.native_lines():
        thread = threading.Thread(target=others)
        thread.start()
        thread.join()
        if is_panicking:
            os.write(2, b"\nthread '<unnamed>' (7) panicked at src/x.rs:1:2:\nwhy\nnote: run")
            raise PanicException
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "a line of another thread\nafter\n"


def test_a_panic_without_stderr(tmp_path: Path) -> None:
    stderr = os.dup(2)
    os.close(2)
    try:
        with guards.native_lines():
            pass
        with pytest.raises(OSError):
            os.fstat(2)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def test_a_text_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place in the text is below the limit of one match, and there are many."""
    folder = saved(tmp_path, pre_tokenizer=explodes())
    tokenizer = load_tokenizer(folder, "m", 97, is_dummy=False)
    before = tokenizer.encode("a")
    with monkeypatch.context() as patch:
        patch.setattr(guards, "TEXT_SECONDS", 0.05)
        said = refusal(folder, ("a" * 12 + "b") * 1000)
    assert said.startswith("the tokenizer of m fails: it takes over 0.05 seconds for 13000 ")
    assert tokenizer.encode("a") == before, "a text after it"


def test_an_interrupted_text_leaves_no_answer_behind() -> None:
    assert guards.in_time(lambda: 1, 1) == 1
    with pytest.raises(KeyboardInterrupt):
        guards.in_time(lambda: signal.raise_signal(signal.SIGINT) or time.sleep(0.5), 1)
    assert guards.in_time(lambda: 2, 1) == 2


def test_texts_in_a_fork(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(saved(tmp_path), "m", 97, is_dummy=False)
    before = tokenizer.encode("a")
    if (child := os.fork()) == 0:
        with suppress(BaseException):
            os._exit(tokenizer.encode("a") != before)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_ids_that_take_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [decoders.Replace("a", "a" * 12 + "b"), decoders.Fuse()]
    steps.append(decoders.Replace(Regex(r"(a+)+$"), "x"))
    tokenizer = load_tokenizer(saved(tmp_path, decoder=decoders.Sequence(steps)), "m", 97, False)
    assert tokenizer.decode([1]).startswith("a")
    monkeypatch.setattr(guards, "TEXT_SECONDS", 0.05)
    with pytest.raises(SetupError, match=r"tokenizer of m fails: it takes over 0.05 seconds"):
        tokenizer.decode([1] * 1000)


@pytest.mark.parametrize(
    ("part", "step"),
    [
        ("normalizer", normalizers.Replace("a", "a" * 20_000)),
        ("normalizer", normalizers.Sequence([normalizers.Replace("a", "a" * 30)] * 3)),
        ("normalizer", normalizers.Prepend("a" * 20_000)),
        ("decoder", decoders.Sequence([decoders.Replace("a", "a" * 30)] * 400)),
    ],
)
def test_text_that_is_multiplied(part: str, step: Any, tmp_path: Path) -> None:
    said = refusal(saved(tmp_path, **{part: step}), "a", (1,))
    assert f"its {part} can lengthen a text by a factor of more than 10000" in said


def template(pieces: int) -> Any:
    return processors.TemplateProcessing(single=" ".join(["$A"] * pieces), special_tokens=[])


def test_steps_without_end(tmp_path: Path) -> None:
    for part, step in (
        ("post_processor", template(1500)),
        ("normalizer", normalizers.Sequence([normalizers.NFC()] * 1500)),
        ("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Whitespace()] * 1500)),
    ):
        said = refusal(saved(tmp_path, **{part: step}), "a")
        assert f"its {part} has over 1000 steps" in said


@pytest.mark.parametrize(
    ("part", "step"),
    [("post_processor", template(400)), ("normalizer", normalizers.Replace("a", "a" * 400))],
)
def test_a_text_that_would_become_too_long(part: str, step: Any, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(saved(tmp_path, **{part: step}), "m", 97, is_dummy=False)
    assert tokenizer.encode("a" * 3)
    with pytest.raises(SetupError, match="factor of 400, too much for a text of 100000 char"):
        tokenizer.encode("a" * 100_000)


def test_a_token_that_would_become_too_long(tmp_path: Path) -> None:
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "a" * 100_000: 1}, unk_token="<unk>"))
    inner.decoder = decoders.Replace("a", "b" * 500)
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(tmp_path)
    assert "by a factor of 500" in refusal(tmp_path, "a")


def test_replacements_that_models_have(tmp_path: Path) -> None:
    steps = [
        normalizers.Prepend("▁"),
        normalizers.Replace(" ", "▁"),
        normalizers.Replace("``", '"'),
    ]
    folder = saved(tmp_path, normalizer=normalizers.Sequence(steps))
    assert load_tokenizer(folder, "m", 97, is_dummy=False).encode("a") == [0]


def test_files_are_regular_and_not_huge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setattr(guards, "FILE_BYTES", 100)
    assert "not a regular file of at most" in refusal(tmp_path, "a")
    monkeypatch.undo()
    (tmp_path / "vocab.txt").symlink_to("/dev/zero")
    assert f"{tmp_path}/vocab.txt is not a regular file" in refusal(tmp_path, "a")


def test_a_limit_that_is_no_number(tmp_path: Path) -> None:
    file = saved(tmp_path) / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": "x"}))
    said = refusal(tmp_path, "a")
    assert "tokenizer of m" in said and "Error" not in said


@pytest.mark.parametrize("template", ["{{ 'a' * 10**11 }}", "{{ 'a' * 2**26 }}"])
def test_a_template_that_multiplies_text(template: str, tmp_path: Path) -> None:
    file = saved(tmp_path) / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = load_tokenizer(tmp_path, "m", 97, is_dummy=False)
    with pytest.raises(SetupError, match="the chat template of m makes too long a text"):
        tokenizer.render([{"role": "user", "content": "a"}])
