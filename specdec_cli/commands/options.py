"""Defines the options that commands share, and turns them into a recipe.

This module maps option names to the dotted keys that they set. The recipe's schema checks the
values. Imports nothing heavy, since `specdec --help` imports this module.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import specdec_cli
from specdec_cli.commands.status import set_up_logging
from specdec_cli.core.types import Permissions
from specdec_cli.errors import OtherSettings, UsageError
from specdec_cli.launch.world import Place
from specdec_cli.stages import begin_stage
from specdec_cli.text import is_unicode, one_line

_MODELS, _PROMPTS, _DECODING = "Models", "Prompts", "Decoding"
_RUN, _OUTPUT = "Run", "Recipe and output"
_K = "num_speculative_tokens"
_METHOD = "speculation.method"
_DRAFT_TP = "draft.tensor_parallel_size"
_SUCH_AS = {
    "--set": "--set sampling.top_p=0.9",
    "--template": "--template enable_thinking=false",
}
# Copies of limits in the recipe's schema, which is too heavy to import here.
_MAX_COUNT, _MAX_BATCH = 2**31 - 1, 2**16


def option(
    flags: str, metavar: str | None, help: str, panel: str | None = None, **more: Any
) -> Any:
    """Make a typer option to use in `Annotated`.

    flags: the option's spellings, separated by spaces.
    metavar: how the help shows the option's value; None for a flag without a value.
    panel: the section of the help that lists the option; None for the default section.
    more: further arguments of `typer.Option`.
    """
    return typer.Option(*flags.split(), metavar=metavar, help=help, rich_help_panel=panel, **more)


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """Return the bundled recipes whose names begin with this text. The shell completes file names
    itself."""
    from specdec_cli.recipe import bundled_recipes

    return [(r.name, r.description) for r in bundled_recipes() if r.name.startswith(incomplete)]


def complete_set(incomplete: str) -> list[str]:
    """Complete this text for the shell: return `KEY=` for each recipe key that begins with it."""
    from specdec_cli.recipe.schema import key_fields

    return [f"{key}=" for key in key_fields() if f"{key}=".startswith(incomplete)]


RecipeArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RECIPE]",
        help="Recipe file, or bundled recipe (`specdec recipe ls`). Default: the demo pair.",
        show_default=False,
        autocompletion=complete_recipe,
    ),
]
_SET = "Set any key of the recipe, such as cache.block_size=32; may be repeated."
Set = Annotated[
    list[str] | None,
    option("--set", "KEY=VALUE", _SET, _OUTPUT, autocompletion=complete_set),
]
Json = Annotated[
    bool,
    option("--json", None, "Print exactly one JSON document on stdout, also on failure.", _OUTPUT),
]


def not_empty(text: str) -> str:
    """Return a name as it is. An empty name, as from `--chat-template "$UNSET"`, is an error."""
    if not text.strip():
        raise typer.BadParameter("the name is empty")
    return text


def folder(text: str) -> Path:
    """Parse a folder's name. An empty name is an error."""
    not_empty(text)
    if len(text.splitlines()) > 1:
        raise typer.BadParameter(f"{one_line(text)} has a line break")
    if not is_unicode(os.path.abspath(text)):
        said = f"{one_line(os.path.abspath(text))} is not valid Unicode, so no recipe could name it"
        raise typer.BadParameter(said)
    return Path(text)


_PROMPT_FILE = "File of prompts: .txt (one a line), .jsonl, .json, .csv, .tsv or .parquet."
_DATASET = "Prompts that replace the recipe's data."
_SAMPLE = "Draw the --limit prompts by seed: random, or stratified to balance categories."
_SKIP_BAD = "Skip lines without a valid prompt, and report their number."
_CHAT = "Render prompts with the target's chat template. Default: only lines with messages."
_TEMPLATE = "Set a switch of the chat template, such as enable_thinking=false; implies --chat."
_CHAT_TEMPLATE = (
    "Another chat template: a Jinja file or one of the tokenizer's names; implies --chat."
)
_SYSTEM = "System message of every conversation; implies --chat."


@dataclass(frozen=True, slots=True)
class Prompts:
    """The options for the source of prompts, shared by every command that reads prompts."""

    prompt: Annotated[
        list[str] | None, option("--prompt", "TEXT", "Text of a prompt; may be repeated.", _PROMPTS)
    ] = None
    prompt_file: Annotated[str | None, option("--prompt-file", "FILE", _PROMPT_FILE, _PROMPTS)] = (
        None
    )
    dataset: Annotated[
        str | None, option("--dataset", "PATH[:SPLIT[:COLUMN]]", _DATASET, _PROMPTS)
    ] = None
    limit: Annotated[
        int | None,
        option("--limit", "N", "Use only the first N prompts.", _PROMPTS, min=1, max=_MAX_COUNT),
    ] = None
    sample: Annotated[str | None, option("--sample", "HOW", _SAMPLE, _PROMPTS)] = None
    skip_bad: Annotated[bool, option("--skip-bad", None, _SKIP_BAD, _PROMPTS)] = False
    chat: Annotated[
        bool | None, option("--chat/--no-chat", None, _CHAT, _PROMPTS, show_default=False)
    ] = None
    system: Annotated[str | None, option("--system", "TEXT", _SYSTEM, _PROMPTS)] = None
    template: Annotated[
        list[str] | None, option("--template", "KEY=VALUE", _TEMPLATE, _PROMPTS)
    ] = None
    chat_template: Annotated[
        str | None,
        option("--chat-template", "FILE", _CHAT_TEMPLATE, _PROMPTS, parser=not_empty),
    ] = None


BatchSizes = Annotated[str | None, option("--batch-size", "LIST", "Batch sizes, such as 1,8.")]
Output = Annotated[
    Path | None,
    option("-o --output", "DIR", "Keep the results in this run folder.", _OUTPUT, parser=folder),
]
Resume = Annotated[
    bool,
    option("--resume", None, "Continue the run in the -o folder, with its recipe and options."),
]
CheckLossless = Annotated[
    bool,
    option(
        "--check-lossless", None, "Check that greedy text equals the target's own (k = 0).", _OUTPUT
    ),
]
Quiet = Annotated[bool, option("-q --quiet", None, "No progress; warnings stay.", _OUTPUT)]
Repeats = Annotated[
    int | None,
    option("--repeats", "N", "Measure each point N times.", _RUN, min=1, max=_MAX_COUNT),
]
_STRICT = "Exit with code 3 if something disturbed the times."
Strict = Annotated[bool, option("--strict", None, _STRICT, _OUTPUT)]
Verbose = Annotated[bool, option("-v --verbose", None, "Log more, and show tracebacks.", _OUTPUT)]

_SERVER = "Get answers from a running server: vLLM, SGLang or another OpenAI-compatible one."
Servers = Annotated[list[str] | None, option("--server", "URL", f"{_SERVER} May be repeated.")]
Server = Annotated[str | None, option("--server", "URL", _SERVER)]

_PLUGIN = (
    "Run a Python file that adds methods, acceptance rules or length policies; may be repeated."
)
Plugins = Annotated[list[str] | None, option("--plugin", "FILE.py", _PLUGIN, _MODELS)]

# The next two tables map parameters of command functions to the recipe keys that they set.
# `_OF_SECTIONS` lists the parameters that have the same names as their keys, by recipe section.
# `_KEYS` contains these and all others; `*` in a recipe key stands for both `target` and `draft`.
_OF_SECTIONS: Final = {
    "speculation": ("method", _K, *(f"synthetic_acceptance_{of}" for of in ("rates", "length"))),
    "sampling": ("temperature", "top_k", "top_p", "max_new_tokens", "ignore_eos"),
    "run": ("device", "batch_size", "repeats", "seed"),
    "cache": ("num_blocks", "block_size", "gpu_memory_utilization"),
    "load": ("request_rate", "arrivals", "max_concurrency", "slo"),
}
_KEYS: Final[Mapping[str, str]] = {
    **{name: f"{section}.{name}" for section, names in _OF_SECTIONS.items() for name in names},
    "target": "target.model",
    "draft": "draft.model",
    "target_tp": "target.tensor_parallel_size",
    "draft_tp": _DRAFT_TP,
    "dtype": "*.dtype",
    "prompt_file": "data.path",
    "dataset": "data.path",
    "dataset_split": "data.split",
    "dataset_column": "data.column",
    "serve": "engine.kind",
    "duration": "load.duration_s",
}
# Maps each parameter of a command function to its option, as users write it, and to the recipe key
# that it sets.
OPTION_KEYS: Final[Mapping[str, tuple[str, str]]] = {
    name: ("--dataset" if name.startswith("dataset") else f"--{name.replace('_', '-')}", key)
    for name, key in _KEYS.items()
}

# Options that set a recipe key, by help panel. All commands that take a recipe share them. Each row
# has the parameter, its type, its metavar (None for a flag), and its help text.
_KEY_OPTIONS: Final = {
    _MODELS: (
        ("target", str, "MODEL", "Target model."),
        ("draft", str, "MODEL", "Draft model."),
        ("method", str, "NAME", "Method that proposes tokens; an unknown name lists all."),
        ("target_tp", int, "N", "Ranks of the target."),
        ("draft_tp", int, "N", "Ranks of the draft; must divide the target's."),
        ("dtype", str, "TYPE", "Data type of both models: auto, float32, bfloat16 or float16."),
    ),
    _RUN: (
        ("device", str, "DEVICE", "auto, cpu, cuda or cuda:N."),
        ("batch_size", int, "N", "Prompts decoded together."),
        ("seed", int, "N", "Seed of all random numbers."),
        ("num_blocks", int, "N", "Number of KV cache blocks. Default: what fits."),
        ("block_size", int, "N", "Tokens per block."),
    ),
    _DECODING: (
        (_K, int, "K", "Proposed tokens per round; 0 decodes without a draft."),
        ("temperature", float, "T", "Sampling temperature; 0 is greedy."),
        ("top_k", int, "N", "Keep the N likeliest tokens; 0 is all."),
        ("top_p", float, "P", "Keep the smallest set of tokens with probability P; 1 is all."),
        ("max_new_tokens", int, "N", "Maximum new tokens per prompt."),
        ("ignore_eos", bool, None, "Continue past the end-of-text token."),
    ),
}
_SPELLINGS = {_K: "-k --k --num-speculative-tokens", "ignore_eos": "--ignore-eos/--no-ignore-eos"}


def _key_parameters() -> Iterator[inspect.Parameter]:
    """Yield `_KEY_OPTIONS` as parameters that typer can read."""
    for panel, rows in _KEY_OPTIONS.items():
        for name, kind, metavar, told in rows:
            flags = _SPELLINGS.get(name, OPTION_KEYS[name][0])
            made = option(flags, metavar, told, panel, show_default=False)
            shown = Annotated[kind | None, made]  # type: ignore[valid-type]
            yield inspect.Parameter(
                name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=shown
            )


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed command line: the values of the options that all commands with a recipe share.

    place: how this process was started, alone or as one of several ranks.
    given: the values of the shared options that set recipe keys, by parameter name.
    """

    place: Place
    given: Mapping[str, Any]
    recipe: RecipeArgument = None
    sets: Set = None
    trust_remote_code: Annotated[
        bool,
        option(
            "--trust-remote-code",
            None,
            "Allow Python code from a model's repository to run.",
            _MODELS,
        ),
    ] = False
    allow_pickle: Annotated[
        bool, option("--allow-pickle", None, "Allow pickled weights, which can run code.", _MODELS)
    ] = False
    threads: Annotated[
        int | None,
        option("--threads", "N", "CPU threads per process.", _RUN, min=1, max=_MAX_BATCH),
    ] = None
    plugin: Plugins = None
    as_json: Json = False
    output: Output = None
    quiet: Quiet = False
    verbose: Verbose = False

    @property
    def is_heard(self) -> bool:
        """True if this process prints messages for the user. Only one process of a run does: rank
        0, or the parent process if it started the ranks."""
        return self.place.rank is None or self.place.rank.tells_user

    @property
    def hides_progress(self) -> bool:
        """True with --quiet, and on all ranks but the first."""
        return self.quiet or not self.place.is_first

    def permissions(self) -> Permissions:
        """Return the permissions that the command line gives."""
        plugins = tuple(os.path.abspath(file) for file in self.plugin or ())
        return Permissions(self.trust_remote_code, self.allow_pickle, plugins)

    def resolve(
        self, own: Mapping[str, object], sets: Sequence[str] = ()
    ) -> "specdec_cli.recipe.Recipe":
        """Resolve the recipe from the command line. Also choose the speculation method that the
        draft needs and, if `sampling.from` asks for it, read the sampling settings from the
        target's files.

        own: the values of the options that only this command has, keyed by the names in
            `OPTION_KEYS`.
        sets: further `KEY=VALUE` items, as for --set.
        """
        from specdec_cli.models.draft_form import with_method
        from specdec_cli.models.generation_config import with_sampling
        from specdec_cli.recipe.choices.registry import method_in

        all_sets, options = [*(self.sets or ()), *sets], {**self.given, **own}
        found = resolve(self.recipe, all_sets, options)
        if found.load.request_rate is not None and "request_rate" not in own:
            told = "load.request_rate: only sweep-k sends requests at a rate"
            raise UsageError(told, "pass --set load.request_rate=null")
        # Options override the recipe. So if --draft is given, the recipe's method may be replaced
        # with one that fits the new draft, unless the command line names a method itself.
        draft = options.get("draft")
        names_method = _METHOD in parse_sets(all_sets) or options.get("method") is not None
        is_free = draft is not None and method_in(draft) is None and not names_method
        return with_sampling(with_method(found, is_free=is_free))


def shared(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the shared options to a command. The command receives their
    values as its first argument, an `Asked`.

    If its second argument is a `Prompts`, the command also gets the options for the source of
    prompts. An option that the command declares itself replaces the shared option of the same name.

    without: the names of shared options to leave out.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(run).parameters.values()
        reads_prompts = bool(own) and own[0].annotation is Prompts
        of_prompts = list(inspect.signature(Prompts).parameters.values()) if reads_prompts else []
        own = own[reads_prompts:]
        hidden = {*without, *(parameter.name for parameter in own)}
        keys = [parameter for parameter in _key_parameters() if parameter.name not in hidden]
        place, _, recipe, *others = inspect.signature(Asked).parameters.values()

        def command(ctx: typer.Context, **values: Any) -> None:
            theirs = {parameter.name: values.pop(parameter.name) for parameter in own}
            given = {parameter.name: values.pop(parameter.name) for parameter in keys}
            where = {parameter.name: values.pop(parameter.name) for parameter in of_prompts}
            asked = Asked(ctx.obj, given, **values)
            set_up_logging(verbose=asked.verbose)
            if asked.threads is not None:
                use_threads(asked.threads)
            begin_stage("reading the recipe")
            load_plugins(asked.plugin)  # first, since the recipe may name plugins' methods
            try:
                run(asked, *([Prompts(**where)] if reads_prompts else []), **theirs)
            except OtherSettings as problem:
                raise problem.about(_typed(ctx, asked, where)) from None

        context = place.replace(name="ctx", annotation=typer.Context)
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [context, recipe, *of_prompts, *own, *keys, *others]
        )
        command.__annotations__ = {}  # typer would prefer these annotations to the signature's
        command.__doc__ = run.__doc__
        return command

    return decorate


def use_threads(count: int) -> None:
    """Set the number of torch's threads in this process and in the ranks that it starts."""
    os.environ |= {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)


def resolve(
    recipe: str | None, sets: Sequence[str] | None, options: Mapping[str, object]
) -> "specdec_cli.recipe.Recipe":
    """Resolve the recipe of a command line, by precedence: option > `--set` > recipe > default.

    `options` maps names of `OPTION_KEYS` to values; None stands for an option that was not given.
    `--draft` may also name a method that proposes without a draft model, or METHOD=DRAFT. This
    method replaces the recipe's.
    """
    import specdec_cli.recipe
    from specdec_cli.recipe.choices.registry import method_in

    given = parse_sets(sets or ())
    overrides, origins = dict(given), dict.fromkeys(given, "--set")
    proposer, origin = options.get("draft"), "--draft"
    if proposer is None:
        proposer, origin = given.get("draft.model"), "--set"
    method = method_in(proposer)
    if method is not None and (origin == "--draft" or _METHOD not in given):
        overrides[_METHOD], origins[_METHOD] = method, origin
    if method is not None and method == proposer:
        # The recipe checks the number of ranks; the other keys of a draft mean nothing.
        dropped = {key for key in (*given, *_KEYS.values()) if key.startswith("draft.")}
        dropped.discard(_DRAFT_TP)
        overrides = {k: v for k, v in overrides.items() if k not in dropped}
        overrides["draft"], origins["draft"] = {"model": proposer}, origin
        options = {k: v for k, v in options.items() if OPTION_KEYS[k][1] not in dropped}
    for name, (flag, key) in OPTION_KEYS.items():
        if (value := options.get(name)) is not None:
            overrides[key] = value
            origins[key] = flag
    replaced = {key: one for key, one in given.items() if origins[key] != "--set"}
    replaced |= {key: one for key, one in given.items() if key not in overrides}
    return specdec_cli.recipe.load_recipe(recipe, overrides, origins, replaced)


def _typed(ctx: typer.Context, asked: Asked, where: Collection[str]) -> set[str]:
    """Return the names of the settings that the user gave on the command line. For each option,
    this includes its parameter's name, that name with an "s", and its recipe key, since settings
    may have any of these names.

    where: the names of the parameters that choose the prompts. All of them count as `prompts`.
    """
    keys = set(parse_sets(asked.sets or ()))
    for name in ctx.params:
        if (source := ctx.get_parameter_source(name)) is None or source.name != "COMMANDLINE":
            continue
        key = "prompts" if name in where else OPTION_KEYS.get(name, ("", name))[1]
        keys |= {name, f"{name}s", key.removeprefix("*.")}
    return keys


def load_plugins(files: Sequence[str] | None) -> None:
    """Run the `--plugin` files. Raises `UsageError` for a bad file."""
    if files:
        from specdec_cli.plugin import load

        for file in files:
            load(file)


def parse_sets(sets: Sequence[str], option: str = "--set") -> dict[str, object]:
    """Parse `["a.b=1"]` into `{"a.b": 1}`. If a key is repeated, its last value counts. Raises
    `UsageError` for an item that is not KEY=VALUE."""
    from specdec_cli.recipe.source import parse_value

    overrides: dict[str, object] = {}
    for item in sets:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UsageError(
                f"{option}: expected KEY=VALUE, got {item!r}", f"such as {_SUCH_AS[option]}"
            )
        overrides[key.strip()] = parse_value(value, f"{option} {key.strip()}")
    return overrides


def parse_counts(text: str | None, option: str) -> list[int]:
    """Parse `1,8` into distinct numbers; empty if the option was not given."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,6}", part) and 0 < int(part) <= _MAX_BATCH for part in parts):
        raise UsageError(
            f"{option}: expected numbers such as 1,8, got {text!r}",
            f"each must be from 1 to {_MAX_BATCH}",
        )
    return list(dict.fromkeys(map(int, parts)))
