"""`specdec generate`: the content and look of both streams, on a terminal and elsewhere."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from specdec_cli.app import main
from specdec_cli.models.tokenizer import PretrainedTokenizer
from specdec_cli.text import inert
from tests.cli.generate_helpers import (
    ANSI,
    PROMPTS,
    Result,
    Run,
    forked,
    on_terminal,
    prompt_options,
    specdec,
)

pytestmark = pytest.mark.usefixtures("small_demo")

SHORT = ("--max-new-tokens", "16")
LINE = re.compile(
    r"(\d+) prompts?, (\d+) tokens, [\d.]+ tokens/s decoding, k=4, [\d.]+ tokens a round, "
    r"\d+% of proposals accepted\n"
)
GREEN, DIM, BOLD = "\x1b[32m", "\x1b[2m", "\x1b[1m"


def text_of(run: Run, *arguments: str | Path) -> list[str]:
    return [o["text"] for o in run(*arguments, "--json", "-q").outputs]


def shown(result: Result) -> str:
    """A terminal's output without control sequences."""
    return ANSI.sub("", result.err).replace("\r", "")


def no_escapes(text: str) -> bool:
    return not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)


# Not a terminal


def test_one_prompt_gives_its_text_alone(run: Run) -> None:
    (text,) = text_of(run, "--prompt", PROMPTS[0], *SHORT)
    result = run("--prompt", PROMPTS[0], *SHORT)
    assert (result.code, result.out) == (0, f"{text}\n")
    assert LINE.fullmatch(result.err)
    quiet = run("--prompt", PROMPTS[0], *SHORT, "-q")
    assert (quiet.out, quiet.err) == (result.out, "")


def test_several_prompts_keep_their_order(run: Run, tmp_path: Path) -> None:
    """The first prompt finishes last, in a batch whose slots are refilled."""
    prompts = tmp_path / "p.txt"
    prompts.write_text("class Long:\ndef f(x):\ndef add(a, b):\nimport os\n")
    recipe = ("--prompt-file", prompts, "--max-new-tokens", "24", "--batch-size", "2")
    stop = ("--set", 'sampling.stop=["return"]')
    document = run(*recipe, *stop, "--json")
    lengths = [len(o["token_ids"]) for o in document.outputs]
    assert lengths[0] > min(lengths[1:])
    expected = [f"==> prompt {o['index']} <==\n{o['text']}\n" for o in document.outputs]
    result = run(*recipe, *stop)
    assert result.out == "".join(expected)
    assert LINE.fullmatch(result.err) and no_escapes(result.out + result.err)


def test_pipes_carry_no_escapes_whatever_the_environment() -> None:
    forced = {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "COLUMNS": "40"}
    result = specdec("generate", *prompt_options(*PROMPTS), *SHORT, "--batch-size", "2", **forced)
    assert result.code == 0 and no_escapes(result.out + result.err)
    assert LINE.fullmatch(result.err)
    assert result.out.count("==> prompt ") == 3


RANDOM = {
    "target": "random weights: the text is meaningless",
    "draft": "random draft weights: the acceptance is meaningless",
}


def said_of_random_weights(result: Result) -> list[str]:
    assert result.code == 0, result.err
    return [role for role, remark in RANDOM.items() if remark in result.err]


def test_random_weights_are_said(run: Run) -> None:
    asked = ("--prompt", "def", "--max-new-tokens", "4")
    target, draft = (("--set", f"{role}.load_format=dummy") for role in RANDOM)
    given = ("--set", "speculation.acceptance=synthetic")
    given += ("--set", "speculation.synthetic_acceptance_length=2.5")
    assert said_of_random_weights(run(*asked)) == []
    result = run(*asked, *target)
    assert said_of_random_weights(result) == ["target"]
    assert result.err.count("\n") == 1 and result.err.endswith(f"; {RANDOM['target']}\n")
    assert said_of_random_weights(run(*asked, *target, *draft)) == ["target"]
    assert said_of_random_weights(run(*asked, *draft)) == ["draft"]
    assert said_of_random_weights(run(*asked, *draft, *given)) == []  # the acceptance is synthetic
    both = run(*asked, *target, *given)
    assert said_of_random_weights(both) == ["target"] and "synthetic acceptance: " in both.err
    assert said_of_random_weights(run(*asked, *draft, "-k", "0")) == []
    document = run(*asked, *target, "--json")
    assert said_of_random_weights(document) == ["target"] and "meaningless" not in document.out


@pytest.mark.parametrize("columns", ["0", "00", "-1", "", "²"])
def test_a_width_that_is_none(columns: str, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """An impossible width hides neither the summary nor the reason for a failed prompt."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", columns)
    few = ("--set", "cache.num_blocks=3", "--max-new-tokens", "8")
    result = run("--prompt", "a", "--prompt", "word " * 200, *few)
    assert result.code == 3 and re.search("^prompt 1 failed: .", result.err, re.M)
    assert LINE.search(result.err)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_to_a_full_disk() -> None:
    with open("/dev/full", "wb") as full, open(os.devnull, "rb") as empty, TemporaryFile() as err:
        streams = (empty.fileno(), full.fileno(), err.fileno())
        child = forked(["generate", "--prompt", "x", *SHORT, "-q"], streams, {})
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        err.seek(0)
        assert err.read() == b"error: cannot write the result: No space left on device\n"


# On a terminal


def test_text_streams_tinted_then_the_table(run: Run) -> None:
    (text,) = text_of(run, "--prompt", PROMPTS[0], "--max-new-tokens", "40")
    result = on_terminal("generate", "--prompt", PROMPTS[0], "--max-new-tokens", "40")
    assert result.code == 0
    # The spinner and its bar come first and are erased.
    after = result.err.rpartition("\x1b[1A\x1b[2K")[2]
    assert "getting ready" in result.err and "ready" not in after
    body, _, table = after.partition(f"\n\n{BOLD}tokens")
    assert ANSI.sub("", body) == PROMPTS[0] + text
    assert body.startswith(DIM + PROMPTS[0]) and GREEN in body
    tinted = "".join(re.findall(r"\x1b\[32m([^\x1b]*)", body))
    assert 0 < len(tinted) < len(text)
    plain = ANSI.sub("", table)
    for name in ("speed", "accepted", "tokens a round", "by position", "round", "first token"):
        assert re.search(rf"^{name} ", plain, re.M), name
    assert "in this colour" in plain
    assert re.search(r"^Speculation is (slower here: )?\d+\.\d\dx ", plain, re.M)


def test_random_weights_are_noted_on_a_terminal_of_no_width() -> None:
    options = ("--prompt", "def", "--max-new-tokens", "4", "--set", "target.load_format=dummy")
    seen = shown(on_terminal("generate", *options, COLUMNS="0"))
    assert re.search(f"^note +{RANDOM['target']} *$", seen, re.M) and "getting ready" in seen


def test_several_prompts_on_a_terminal(run: Run) -> None:
    texts = text_of(run, *prompt_options(*PROMPTS), *SHORT)
    seen = shown(on_terminal("generate", *prompt_options(*PROMPTS), *SHORT))
    blocks = [
        f"── prompt {i} ──\n{prompt}{text}\n"
        for i, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True))
    ]
    assert "\n".join(blocks) in seen


@pytest.mark.parametrize(
    ("k", "stops"), [(0, ["et"]), (4, ["et"]), (4, ["et", "zzzzzzzz"])], ids=["0", "4", "long"]
)
def test_stop_strings_are_cut_live_too(k: int, stops: list[str], run: Run) -> None:
    """The last token of the stop string reaches past it."""
    options = ("--prompt", PROMPTS[0], "-k", str(k), "--max-new-tokens", "24")
    stop = ("--set", f"sampling.stop={json.dumps(stops)}")
    (text,) = text_of(run, *options, *stop)
    assert text.endswith("r")
    seen = shown(on_terminal("generate", *options, *stop))
    assert f"{PROMPTS[0]}{text}\n\ntokens" in seen


@pytest.mark.parametrize("seed", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_noise_is_the_same_live(seed: str, run: Run) -> None:
    """At this temperature tokens are parts of characters that are never completed."""
    options = (
        "--prompt",
        "x",
        "--ignore-eos",
        "--temperature",
        "1000",
        "--seed",
        seed,
        "--max-new-tokens",
        "150",
    )
    (text,) = text_of(run, *options)
    assert "\ufffd" in text
    assert shown(on_terminal("generate", *options, "-q")) == f"x{inert(text)}\n"


def test_interrupted_text_ends_its_line() -> None:
    options = ("--prompt", PROMPTS[0], "--max-new-tokens", "1000", "--ignore-eos")
    result = on_terminal("generate", *options, interrupt_at=b"return")
    assert result.code == 130
    # The terminal itself shows ^C at the cursor.
    assert shown(result).replace("^C", "").endswith("\nerror: interrupted\n")


def test_interrupted_bar_gives_the_cursor_back() -> None:
    options = (*prompt_options(*PROMPTS), "--max-new-tokens", "1000", "--ignore-eos")
    result = on_terminal("generate", *options, "--batch-size", "2", interrupt_at=b"prompts ")
    assert result.code == 130 and result.err.endswith("error: interrupted\n")
    assert result.err.rindex("\x1b[?25h") > result.err.rindex("\x1b[?25l")


def test_quiet_terminal_shows_the_text_alone(run: Run) -> None:
    (text,) = text_of(run, "--prompt", PROMPTS[0], *SHORT)
    result = on_terminal("generate", "--prompt", PROMPTS[0], *SHORT, "-q", NO_COLOR="1")
    assert shown(result) == f"{PROMPTS[0]}{text}\n"


def test_no_color_and_a_narrow_terminal(run: Run) -> None:
    prompt = "def a_function_with_a_name(its_first_argument, its_second):\n\treturn 1\n"
    (text,) = text_of(run, "--prompt", prompt, "--max-new-tokens", "32")
    assert max(map(len, text.splitlines())) > 20
    result = on_terminal(
        "generate", "--prompt", prompt, "--max-new-tokens", "32", columns=20, NO_COLOR="1"
    )
    # Styles such as bold may stay; a colour is 3x, 4x, 9x or 38;...
    assert not re.search(r"\x1b\[[\d;]*[349]\d", result.err)
    assert prompt + text in shown(result) and "in this colour" not in result.err


def test_bar_for_a_batch(run: Run) -> None:
    texts = text_of(run, *prompt_options(*PROMPTS), *SHORT)
    options = (*prompt_options(*PROMPTS), *SHORT, "--batch-size", "2")
    result = on_terminal("generate", *options, columns=30)
    seen = shown(result)
    assert "prompts ━" in seen and "0/3" in seen and "3/3" in seen
    for i, text in enumerate(texts):  # nothing wraps, although the terminal is narrow
        assert f"==> prompt {i} <==\n{text}\n" in seen


def test_bar_does_not_take_the_text_away(run: Run, tmp_path: Path) -> None:
    """Case: stdout is a file and stderr is a terminal."""
    options = (*prompt_options(*PROMPTS), *SHORT, "--batch-size", "2")
    expected = run(*options).out
    with open(tmp_path / "out.txt", "wb") as file:
        result = on_terminal("generate", *options, stdout=file.fileno())
    assert (tmp_path / "out.txt").read_text() == expected
    assert "3/3" in result.err and "==> prompt" not in result.err
    assert re.search(r"^tokens ", shown(result), re.M)


def test_bar_beside_a_document(tmp_path: Path) -> None:
    options = (*prompt_options(*PROMPTS), "--max-new-tokens", "4", "--batch-size", "2", "--json")
    with open(tmp_path / "out.json", "wb") as file:
        result = on_terminal("generate", *options, stdout=file.fileno())
    document = json.loads((tmp_path / "out.json").read_text())
    assert len(document["outputs"]) == 3 and "3/3" in result.err
    # 12 tokens are too few to compare speeds.
    assert "Speculation is" not in result.err


# Text that would drive a terminal

EVIL = "\x1b]0;title\x07\x1b[31m[red]bold[/red]\x9b2J\u202e:smile:"
INERT = "\\x1b]0;title\\x07\\x1b[31m[red]bold[/red]\\x9b2J\\u202e:smile:"


@pytest.fixture
def evil_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose every token stands for the hostile text."""
    monkeypatch.setattr(PretrainedTokenizer, "decode", lambda _, ids: EVIL * len(ids))


@pytest.mark.usefixtures("evil_model")
def test_model_text_is_inert(run: Run) -> None:
    options = (*prompt_options("a", "b"), "--max-new-tokens", "3", "--ignore-eos")
    result = run(*options)
    assert result.out.count(f"{INERT * 3}\n") == 2 and no_escapes(result.out + result.err)
    document = run(*options, "--json")
    assert document.outputs[0]["text"] == EVIL * 3
    assert no_escapes(document.out.replace("\x9b", ""))  # JSON escapes characters below a space


@pytest.mark.usefixtures("evil_model")
def test_live_text_is_inert() -> None:
    result = on_terminal(
        "generate", "--prompt", EVIL, "--max-new-tokens", "3", "--ignore-eos", "-q", NO_COLOR="1"
    )
    assert shown(result) == f"{INERT * 4}\n"
    assert set(ANSI.findall(result.err)) <= {DIM, "\x1b[0m"}


def test_names_of_files_are_inert(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "\x1b[31m[red]\x07"
    for arguments in (
        ("--prompt-file", folder / "p.txt"),
        ("--prompt", "x", "--target", folder),
        (folder / "r.yaml",),
        ("--prompt", "x", "--set", f"\x1b[31m[red]={EVIL}"),
    ):
        result = run(*arguments)
        assert result.code in (2, 5) and no_escapes(result.out + result.err)
        assert "[red]" in result.err


def test_prompt_that_cannot_run_is_inert(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f"{json.dumps({'prompt': EVIL * 9})}\n{json.dumps({'prompt': 'x'})}\n")
    result = run("--prompt-file", path, "--set", "cache.max_model_len=16", *SHORT)
    assert result.code == 3 and no_escapes(result.out + result.err)


def test_a_closed_stdout_is_no_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    for arguments in (
        ["generate", "--prompt", "x", "-k", "0", "--max-new-tokens", "1"],
        ["profile-blocks", "--estimate"],
    ):
        assert main([*arguments, "--device", "cpu", "-q"]) == 0
        assert sys.stdout is None and capsys.readouterr().err == ""


def test_a_closed_pipe_ends_quietly() -> None:
    """In a fork. `test_app.py` has processes that end so, too."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(os.devnull, "rb") as empty, TemporaryFile() as err:
        streams = (empty.fileno(), writing, err.fileno())
        child = forked(["generate", "--prompt", "x", *SHORT], streams, {})
        os.close(writing)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        err.seek(0)
        assert (code, err.read()) == (128 + signal.SIGPIPE, b"")
