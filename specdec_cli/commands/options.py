"""The options that commands share, and how they become a recipe.

Knows option names and the dotted keys that they set. Does not know which values are allowed: the
recipe's schema checks them. Imports nothing heavy, since `specdec --help` imports this module.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import specdec_cli
from specdec_cli.errors import UsageError
from specdec_cli.text import inert, is_unicode, one_line

_MODELS, _TEXT, _RUN, _OUTPUT = "Models", "Decoding", "Run", "Recipe and output"
_MAX_COUNT = 2**31 - 1  # the limit in the recipe's schema, which is too heavy to import here

RecipeArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RECIPE]",
        help="Recipe file, or bundled recipe (`specdec recipe ls`). Default: the demo pair.",
        show_default=False,
    ),
]
Target = Annotated[
    str | None,
    typer.Option("--target", metavar="MODEL", help="Target model.", rich_help_panel=_MODELS),
]
Draft = Annotated[
    str | None,
    typer.Option("--draft", metavar="MODEL", help="Draft model.", rich_help_panel=_MODELS),
]
TargetTP = Annotated[
    int | None,
    typer.Option("--target-tp", metavar="N", help="Ranks of the target.", rich_help_panel=_MODELS),
]
DraftTP = Annotated[
    int | None,
    typer.Option(
        "--draft-tp",
        metavar="N",
        help="Ranks of the draft; must divide the target's.",
        rich_help_panel=_MODELS,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="Data type of both models: auto, float32, bfloat16 or float16.",
        rich_help_panel=_MODELS,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code from a model's repository.",
        rich_help_panel=_MODELS,
    ),
]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Load pickled weights, which can run code.",
        rich_help_panel=_MODELS,
    ),
]
Plugin = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="FILE.py",
        help="Run a Python file that adds methods, acceptance rules or length policies; may be "
        "repeated.",
        rich_help_panel=_MODELS,
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "-k",
        "--num-speculative-tokens",
        metavar="K",
        help="Proposed tokens per round; 0 decodes without a draft.",
        rich_help_panel=_TEXT,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        metavar="T",
        help="Sampling temperature; 0 is greedy.",
        rich_help_panel=_TEXT,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k", metavar="N", help="Keep the N likeliest tokens; 0 is all.", rich_help_panel=_TEXT
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        metavar="P",
        help="Keep the smallest set of tokens with probability P; 1 is all.",
        rich_help_panel=_TEXT,
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens", metavar="N", help="Most tokens per prompt.", rich_help_panel=_TEXT
    ),
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--no-ignore-eos",
        help="Continue past the end-of-text token.",
        show_default=False,
        rich_help_panel=_TEXT,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.", rich_help_panel=_RUN
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size", metavar="N", help="Prompts decoded together.", rich_help_panel=_RUN
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Seed of all random numbers.", rich_help_panel=_RUN),
]
NumBlocks = Annotated[
    int | None,
    typer.Option(
        "--num-blocks", metavar="N", help="KV cache blocks, else what fits.", rich_help_panel=_RUN
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option("--block-size", metavar="N", help="Tokens per block.", rich_help_panel=_RUN),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit",
        metavar="N",
        min=1,
        max=_MAX_COUNT,
        help="Use only the first N prompts.",
        rich_help_panel=_RUN,
    ),
]
SkipBad = Annotated[
    bool,
    typer.Option(
        "--skip-bad",
        help="Skip lines that hold no valid prompt, and report how many.",
        rich_help_panel=_RUN,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any key of the recipe, such as cache.block_size=32; may be repeated.",
        rich_help_panel=_OUTPUT,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print exactly one JSON document on stdout, also on failure.",
        rich_help_panel=_OUTPUT,
    ),
]


def folder(text: str) -> Path:
    """The folder that `-o` names. An empty name, as from `-o "$UNSET"`, is an error."""
    return _folder(text, "-o")


def run_folder(text: str) -> Path:
    """The folder that DIR names. An empty name is an error, not the current folder."""
    return _folder(text, "DIR")


def _folder(text: str, name: str) -> Path:
    if not text.strip():
        raise typer.BadParameter("the name is empty", param_hint=name)
    if not is_unicode(os.path.abspath(text)):
        said = f"{one_line(os.path.abspath(text))} is not valid Unicode, so no recipe could name it"
        raise typer.BadParameter(said, param_hint=name)
    return Path(text)


Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="DIR",
        parser=folder,
        help="Keep the results in this run folder.",
        rich_help_panel=_OUTPUT,
    ),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress.", rich_help_panel=_OUTPUT)]
Verbose = Annotated[
    bool,
    typer.Option("-v", "--verbose", help="Log more, and show tracebacks.", rich_help_panel=_OUTPUT),
]

# Parameter of a command function -> (option as users write it, recipe key that it sets). The parts
# of --dataset have names of their own.
OPTION_KEYS: Final[Mapping[str, tuple[str, str]]] = {
    "target": ("--target", "target.model"),
    "draft": ("--draft", "draft.model"),
    "target_tp": ("--target-tp", "target.tensor_parallel_size"),
    "draft_tp": ("--draft-tp", "draft.tensor_parallel_size"),
    "num_speculative_tokens": ("--num-speculative-tokens", "speculation.num_speculative_tokens"),
    "dtype": ("--dtype", "*.dtype"),
    "device": ("--device", "run.device"),
    "temperature": ("--temperature", "sampling.temperature"),
    "top_k": ("--top-k", "sampling.top_k"),
    "top_p": ("--top-p", "sampling.top_p"),
    "max_new_tokens": ("--max-new-tokens", "sampling.max_new_tokens"),
    "ignore_eos": ("--ignore-eos", "sampling.ignore_eos"),
    "batch_size": ("--batch-size", "run.batch_size"),
    "seed": ("--seed", "run.seed"),
    "num_blocks": ("--num-blocks", "cache.num_blocks"),
    "block_size": ("--block-size", "cache.block_size"),
    "gpu_memory_utilization": ("--gpu-memory-utilization", "cache.gpu_memory_utilization"),
    "prompt_file": ("--prompt-file", "data.path"),
    "dataset": ("--dataset", "data.path"),
    "dataset_split": ("--dataset", "data.split"),
    "dataset_column": ("--dataset", "data.column"),
    "synthetic_acceptance_rates": (
        "--synthetic-acceptance-rates",
        "speculation.synthetic_acceptance_rates",
    ),
    "synthetic_acceptance_length": (
        "--synthetic-acceptance-length",
        "speculation.synthetic_acceptance_length",
    ),
}


def given(ctx: typer.Context, *but: str) -> dict[str, Any]:
    """The given options that set a recipe key, by their names in `OPTION_KEYS`.

    but: options that the command reads itself, such as lists. The result has the order of
    `OPTION_KEYS`, not that of the command line.
    """
    values = {name: ctx.params.get(name) for name in OPTION_KEYS if name not in but}
    return {name: value for name, value in values.items() if value is not None}


def load_plugins(files: Sequence[str] | None) -> tuple[str, ...]:
    """Run the plugins of a command line, before its recipe is read: their absolute paths."""
    if not files:
        return ()
    from specdec_cli.plugin import load

    for file in files:
        load(file)
    return tuple(os.path.abspath(file) for file in files)


def resolve(
    recipe: str | None, sets: Sequence[str] | None, options: Mapping[str, object]
) -> "specdec_cli.recipe.Recipe":
    """The recipe of a command line, by precedence: option > `--set` > recipe > default.

    `options` maps names of `OPTION_KEYS` to values; None stands for an option that was not given.
    `--draft` may also name a method that needs no draft model.
    """
    import specdec_cli.recipe
    from specdec_cli.recipe.choices.registry import without_draft

    overrides = parse_sets(sets or ())
    origins = dict.fromkeys(overrides, "--set")
    proposer = options.get("draft")
    if isinstance(proposer, str) and without_draft(proposer):
        overrides = {k: v for k, v in overrides.items() if not k.startswith("draft.")}
        overrides |= {"draft": None, "speculation.method": proposer}
        origins |= {"draft": "--draft", "speculation.method": "--draft"}
        options = {k: v for k, v in options.items() if not OPTION_KEYS[k][1].startswith("draft.")}
    for name, value in options.items():
        flag, key = OPTION_KEYS[name]
        if value is not None:
            overrides[key] = value
            origins[key] = flag
    return specdec_cli.recipe.load_recipe(recipe, overrides, origins)


def warn_of_unused(
    resolved: "specdec_cli.recipe.Recipe", *, has_draft: bool, num_proposed: int | None = None
) -> None:
    """Warn about proposal options that have no effect with the recipe's method."""
    from specdec_cli.recipe.choices.registry import NONE, needs_draft

    method = resolved.speculation.method
    if has_draft and resolved.draft is not None and not needs_draft(method):
        typer.echo(f"warning: --draft is not used: speculation.method is {method}", err=True)
    elif num_proposed and method == NONE:
        why = "speculation.method is none" if resolved.draft else "the recipe has no draft"
        typer.echo(f"warning: -k {num_proposed} has no effect: {why}", err=True)


def parse_sets(sets: Sequence[str]) -> dict[str, object]:
    """Parse `["a.b=1"]` into `{"a.b": 1}`; the last value of a repeated key counts."""
    from specdec_cli.recipe.source import parse_value

    overrides: dict[str, object] = {}
    for item in sets:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(
                f"--set: expected KEY=VALUE, got {item!r}", "such as --set sampling.top_p=0.9"
            )
        overrides[key.strip()] = parse_value(value, f"--set {key.strip()}")
    return overrides


def parse_counts(text: str | None, option: str) -> list[int]:
    """Parse `1,8` into distinct numbers from 1 on; an option that was not given has none."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,6}", part) and int(part) for part in parts):
        raise UsageError(f"{option}: expected numbers such as 1,8, got {text!r}")
    return list(dict.fromkeys(map(int, parts)))


class _InertFormatter(logging.Formatter):
    """Escapes control characters: log lines may hold names of files and models."""

    def format(self, record: logging.LogRecord) -> str:
        return inert(super().format(record))


def set_up_logging(*, quiet: bool, verbose: bool) -> None:
    """Send the package's logger to stderr: errors with -q, everything with -v, else warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(_InertFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    level = logging.DEBUG if verbose else logging.ERROR if quiet else logging.WARNING
    logging.getLogger("specdec").setLevel(level)
