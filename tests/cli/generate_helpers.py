"""Runs `specdec generate` in tests: in this process, in another, and on a pseudo-terminal."""

import fcntl
import functools
import json
import logging
import os
import pty
import re
import shutil
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from specdec_cli.app import main
from tests.support import save_tiny

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "specdec_cli" / "demo"
PROMPTS = [
    "def add(a, b):\n",
    "class Stack:\n    def push(self, item):\n",
    "import os\n\ndef listing(path):\n",
]
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Result:
    """The exit code and the output of one command line."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """stdout, read as exactly one JSON document."""
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def outputs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.document["outputs"]
        return found


Run = Callable[..., Result]
ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT  # asks, and leaves the process to be waited for


def generate(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Result:
    """Run `specdec generate ARGUMENTS` in this process, on the CPU by default."""
    device = () if "--device" in arguments else ("--device", "cpu")
    capsys.readouterr()
    code = main(["generate", *map(str, arguments), *device])
    captured = capsys.readouterr()
    return Result(code, captured.out, captured.err)


def prompt_options(*prompts: str) -> list[str]:
    return [part for prompt in prompts for part in ("--prompt", prompt)]


def environment(**extra: str) -> dict[str, str]:
    """A bare environment in which the command runs from this checkout."""
    return {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TERM": "xterm-256color",
        **extra,
    }


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "specdec_cli", *map(str, arguments)]


def specdec(
    *arguments: str | Path, until: Callable[[], bool] | None = None, **extra: str
) -> Result:
    """Run `specdec ARGUMENTS` in a process of its own, with an empty standard input.

    until: send Ctrl-C once this is true. extra: added to its environment.
    """
    with open(os.devnull, "rb") as empty, TemporaryFile() as out, TemporaryFile() as err:
        child = forked(arguments, (empty.fileno(), out.fileno(), err.fileno()), extra)
        if until is not None:
            while not until() and os.waitid(os.P_PID, child, ENDED) is None:
                time.sleep(0.02)
            os.kill(child, signal.SIGINT)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return Result(code, out.read().decode(), err.read().decode())


def forked(
    arguments: Sequence[str | Path],
    streams: tuple[int, int, int],
    extra: Mapping[str, str],
    is_terminal: bool = False,
) -> int:
    """Start `specdec ARGUMENTS` in a fork of this process, which has loaded torch; its id.

    streams: descriptors that become its standard ones. extra: added to its environment.
    is_terminal: its standard input is a terminal, which controls it.
    """
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 99
    try:
        os.setsid()
        for descriptor, given in enumerate(streams):
            os.dup2(given, descriptor)
        if is_terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.environ.clear()
        os.environ.update(environment(**extra))
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
        logging.getLogger().handlers.clear()  # pytest's; they make the command's own needless
        torch.set_num_threads(1)  # a fork has only this thread
        code = main(list(map(str, arguments)))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def on_terminal(
    *arguments: str | Path,
    columns: int = 100,
    stdout: int | None = None,
    interrupt_at: bytes | None = None,
    **extra: str,
) -> Result:
    """Run `specdec ARGUMENTS` on a pseudo-terminal; both streams of the result are what it shows.

    stdout: a file descriptor that replaces the terminal as standard output. interrupt_at: send
    Ctrl-C once this text has been shown.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    streams = (theirs, theirs if stdout is None else stdout, theirs)
    child = forked([*arguments, "--device", "cpu"], streams, extra, is_terminal=True)
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the last writer is gone
            break
        if not piece:
            break
        seen += piece
        if interrupt_at is not None and interrupt_at in seen:
            os.write(ours, b"\x03")
            interrupt_at = None
    os.close(ours)
    text = seen.decode().replace("\r\n", "\n")
    return Result(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text, text)


@functools.cache
def demo_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO / "target")


def word_tokenizer(folder: Path, words: list[str]) -> Path:
    """Write a tokenizer of whole words to a model's folder."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": words[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tiny_model(folder: Path, family: str = "llama", first_word: str = "w", **changes: Any) -> Path:
    """Write a random checkpoint with a tokenizer of words `w0`, `w1` and so on."""
    save_tiny(folder, family, **changes)
    return word_tokenizer(folder, [f"{first_word}{i}" for i in range(97)])


def copy_of_demo(folder: Path) -> Path:
    return Path(shutil.copytree(DEMO / "target", folder))


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def chat_model(folder: Path, template: object = CHAT_TEMPLATE) -> Path:
    """A copy of the demo draft whose tokenizer has a chat template and a BOS token."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).symlink_to(DEMO / "draft" / name)
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((DEMO / "target" / "tokenizer_config.json").read_text())
    changes = {"add_bos_token": True, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | changes))
    return folder
