"""The options that every command has, and how they become a recipe.

Knows option names and the dotted keys that they set; not what the values may be (the recipe's
schema checks them). Imports nothing heavy: `specdec --help` reads this module.
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

_MODELS, _TEXT, _RUN, _OUTPUT = "Models", "Writing", "Running", "Recipe and output"
_MAX_COUNT = 2**31 - 1  # of a recipe's schema, which is too heavy to import here

RecipeArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RECIPE]",
        help="A recipe file or a bundled recipe (`specdec recipe ls`); the demo pair without one.",
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
        help="Ranks of the draft; divides the target's.",
        rich_help_panel=_MODELS,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="auto, float32, bfloat16 or float16, for both models.",
        rich_help_panel=_MODELS,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code that comes with a model.",
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
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "-k",
        "--num-speculative-tokens",
        metavar="K",
        help="Proposed tokens a round; 0 is plain decoding.",
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
        "--top-k", metavar="N", help="Keep the N likeliest; 0 is all.", rich_help_panel=_TEXT
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        metavar="P",
        help="Keep the smallest set with probability P; 1 is all.",
        rich_help_panel=_TEXT,
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens", metavar="N", help="Most tokens a prompt gets.", rich_help_panel=_TEXT
    ),
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--no-ignore-eos",
        help="Write on past the end-of-text token.",
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
    typer.Option("--seed", metavar="N", help="Seed of every draw.", rich_help_panel=_RUN),
]
NumBlocks = Annotated[
    int | None,
    typer.Option(
        "--num-blocks", metavar="N", help="KV cache blocks; else what fits.", rich_help_panel=_RUN
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option("--block-size", metavar="N", help="Tokens a block.", rich_help_panel=_RUN),
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
        help="Leave out lines that are no prompt, and count them.",
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
        help="Exactly one JSON document on stdout, also on failure.",
        rich_help_panel=_OUTPUT,
    ),
]


def folder(text: str) -> Path:
    """What `-o` names. `-o "$UNSET"` of a script is not the current folder."""
    return _folder(text, "-o")


def run_folder(text: str) -> Path:
    """What DIR names, which is not the current folder for an empty name either."""
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
        help="Write a run folder.",
        rich_help_panel=_OUTPUT,
    ),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress.", rich_help_panel=_OUTPUT)]
Verbose = Annotated[
    bool,
    typer.Option("-v", "--verbose", help="More log, and tracebacks.", rich_help_panel=_OUTPUT),
]

# The command function's parameter, its option as users write it, and the key that it sets; the
# parts of --dataset by names of their own.
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
    """The options of a command that were given and set a key, by names of `OPTION_KEYS`.

    but: those that a command reads in its own way, such as lists. In the table's order, whatever
    the command line's is.
    """
    values = {name: ctx.params.get(name) for name in OPTION_KEYS if name not in but}
    return {name: value for name, value in values.items() if value is not None}


def resolve(
    recipe: str | None, sets: Sequence[str] | None, options: Mapping[str, object]
) -> "specdec_cli.recipe.Recipe":
    """The recipe that a command line asks for: option > `--set` > recipe > default.

    `options` maps names of `OPTION_KEYS` to values; None is an option that was not given.
    """
    import specdec_cli.recipe

    overrides = parse_sets(sets or ())
    origins = dict.fromkeys(overrides, "--set")
    for name, value in options.items():
        flag, key = OPTION_KEYS[name]
        if value is not None:
            overrides[key] = value
            origins[key] = flag
    return specdec_cli.recipe.load_recipe(recipe, overrides, origins)


def warn_of_unused(
    resolved: "specdec_cli.recipe.Recipe", *, has_draft: bool, num_proposed: int | None = None
) -> None:
    """Say which options about proposals come to nothing, since the recipe's method is another."""
    method = resolved.speculation.method
    if has_draft and method != "draft_model":
        typer.echo(f"warning: --draft is not used: speculation.method is {method}", err=True)
    elif num_proposed and method == "none":
        why = "speculation.method is none" if resolved.draft else "the recipe has no draft"
        typer.echo(f"warning: -k {num_proposed}: nobody proposes, {why}", err=True)


def parse_sets(sets: Sequence[str]) -> dict[str, object]:
    """`["a.b=1"]` as `{"a.b": 1}`; of a key given twice the last counts."""
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
    """`1,8` as numbers from 1 on, each once; none where the option was not given."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,6}", part) and int(part) for part in parts):
        raise UsageError(f"{option}: expected numbers such as 1,8, got {text!r}")
    return list(dict.fromkeys(map(int, parts)))


class _InertFormatter(logging.Formatter):
    """Log lines may hold names of files and models."""

    def format(self, record: logging.LogRecord) -> str:
        return inert(super().format(record))


def set_up_logging(*, quiet: bool, verbose: bool) -> None:
    """One logger, on stderr: errors with -q, everything with -v, otherwise warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(_InertFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    level = logging.DEBUG if verbose else logging.ERROR if quiet else logging.WARNING
    logging.getLogger("specdec").setLevel(level)
