"""Hints for command lines that the parser refuses. Imports nothing heavy."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Final

# Names that people try, without dashes, and ours.
_OTHER_NAMES: Final = {
    "checkpoint": "--target",
    "column": "--dataset FILE::COLUMN",
    "data": "--prompt-file",
    "draft-model": "--draft",
    "gpu": "--device",
    "input": "--prompt-file",
    "max-length": "--max-new-tokens",
    "max-tokens": "--max-new-tokens",
    "model": "--target",
    "n": "--limit",
    "num-prompts": "--limit",
    "num-samples": "--limit",
    "out": "-o",
    "prompts": "--prompt-file",
    "output-dir": "-o",
    "runs": "--repeats",
    "speculative-model": "--draft",
    "tensor-parallel-size": "--target-tp",
    "tp": "--target-tp",
    "bench": "sweep-k",
    "benchmark": "sweep-k",
    "check": "validate",
    "list": "ls",
    "lint": "validate",
    "run": "generate",
}


def explained(error: Any) -> tuple[str, str]:
    """Message and hint for an error of typer's parser."""
    message: str = getattr(error, "format_message", error.__str__)()
    context = getattr(error, "ctx", None)
    hint = f"see `{context.command_path if context else 'specdec'} --help`"
    if context is None:
        return message, hint
    parameters = context.command.params
    names = getattr(context.command, "commands", {})
    wrong: Any = getattr(error.__cause__, "errors", None)  # of pydantic, which reads numbers
    if wrong is not None:
        from specdec_cli.recipe.problems import describe

        flag = next(one for one in error.param.opts if one.startswith("--"))
        message = f"{flag}: {describe(wrong()[0])}"
    elif hasattr(error, "possibilities"):
        message = error.message
        hint = _guess(error.option_name, [o for p in parameters for o in p.opts]) + hint
    elif unknown := re.search(r"No such command '([^']*)'\.", message):
        message = unknown[0]
        shown = [name for name, one in names.items() if not one.hidden]
        hint = f"{_guess(unknown[1], shown)}commands: {', '.join(shown)}; {hint}"
    elif "unexpected extra argument" in message and "prompt" in {p.name for p in parameters}:
        hint = f"a prompt goes after --prompt, in quotes; {hint}"
    return message, hint


def _guess(given: str, known: Sequence[str]) -> str:
    """`did you mean --target? `, or "" if nothing comes near."""
    name = given.replace("_", "-")
    other = _OTHER_NAMES.get(name.lstrip("-"), "")
    near = get_close_matches(name, known, n=1, cutoff=0.7)
    found = other if other.split(" ")[0] in known else "".join(near)
    return f"did you mean {found}? " if found else ""
