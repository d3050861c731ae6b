"""Parts that cases share: commands that read a model, and files that are none."""

import os
import random
from pathlib import Path

Found = tuple[str, list[str]]  # what is hostile about a case, and its command line
SHORT = ["--max-new-tokens", "3", "--device", "cpu"]


_NAMES = ("a\nb", "\x1b[31mred", "n" * 200, "é\u202e", "\udcff", "a b", "=1+1", "%s", "$x{", "'")


def model_in(folder: Path, rng: random.Random) -> Path:
    """The folder of a case's model, which may have a hostile name."""
    return folder / (rng.choice(_NAMES) if rng.random() < 0.1 else "model")


def linked(source: Path, folder: Path, *without: str) -> Path:
    """A model's folder with links to the files of another."""
    folder.mkdir()
    for file in source.iterdir():
        if file.name not in without:
            (folder / file.name).symlink_to(file)
    return folder


_ALONE = ("alone", "ngram", "profile", "plan")
_WITH_DEMO = ("alone", "alone", "target", "draft", "ngram", "plan", "profile", "sweep")


def run_of(model: Path, rng: random.Random, *, is_alone: bool = False) -> list[str]:
    """A short command that reads a model. is_alone: the demo models have another vocabulary."""
    prompt = ["--prompt", "def add(a, b):"]
    k = ["-k", str(rng.choice([0, 1, 2, 5]))]
    command = rng.choice(_ALONE if is_alone else _WITH_DEMO)
    match command:
        case "alone":
            return ["generate", "--target", str(model), "-k", "0", *prompt, *SHORT]
        case "target":
            return ["generate", "demo", "--target", str(model), *k, *prompt, *SHORT]
        case "draft":
            return ["generate", "demo", "--draft", str(model), *k, *prompt, *SHORT]
        case "ngram":
            return ["generate", "--target", str(model), "--draft", "ngram", *k, *prompt, *SHORT]
        case "plan":
            draft = ["--draft", "ngram"] * is_alone
            run = ["sweep-k", "demo", "--target", str(model), *draft, "--k", "0-2", "--dry-run"]
            return [*run, *SHORT]
        case "profile":
            return ["profile-blocks", "--target", str(model), "--device", "cpu", "-k", "0"]
        case _:
            few = ["--k", "0,2", "--limit", "1", "--set", "run.repeats=1", "--set", "run.warmup=0"]
            return ["sweep-k", "demo", "--draft", str(model), *few, *SHORT]


def special(path: Path, what: str) -> None:
    """Put something at a path that is not a regular file."""

    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "nowhere":
        path.symlink_to("nowhere")
    else:
        path.symlink_to(path.name)
