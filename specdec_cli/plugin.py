"""A user's own methods, acceptance rules and length policies, in a file that `--plugin` runs.

A decorator registers a class under a name that recipes can use. The class is called with one
argument:

    @method("echo")     # called with a `methods.base.MethodParts`
    @rule("lenient")    # called with the recipe's `speculation`
    @policy("sawtooth") # called with the recipe's `speculation`

`docs/methods.md` builds an example of each kind. Only the command line may name a plugin, never a
recipe, since a plugin runs code.
"""

import hashlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

from specdec_cli.acceptance.base import Rule
from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.methods.base import Method, MethodParts, Proposer, text_bytes
from specdec_cli.models.description import DraftPlace
from specdec_cli.models.draft import Draft
from specdec_cli.plugged import PluggedMethod, PluggedPolicy, PluggedRule, blamed, built, flag
from specdec_cli.recipe import SpeculationSection
from specdec_cli.recipe.choices.base import Choice, MethodChoice, RuleChoice, WeightsFrom
from specdec_cli.recipe.choices.registry import METHODS, POLICIES, RULES, add
from specdec_cli.recipe.watched import WatchedOptions
from specdec_cli.text import one_line

Made = TypeVar("Made", bound=type[Any])

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
LOADED: dict[Path, str] = {}  # each plugin file's SHA-256, for the record of the environment


def method(name: str, *, weights_from: WeightsFrom = "none") -> Callable[[Made], Made]:
    """Return a decorator that registers a class as a method of proposing tokens.

    weights_from: where the method's weights are. `none`: it has no weights. `draft`: in the draft
    that the recipe names. `target`: in the target's own files; the class then needs `describe`.

    If the class has its own kind of draft, it defines `describe`, which makes the draft from a
    `models.description.DraftPlace`. With `target`, the decorator raises `ValueError` if the class
    has no `describe`.
    """

    def register(made: Made) -> Made:
        _check(name, made)
        own = getattr(made, "describe", None)
        if weights_from == "target" and own is None:
            raise ValueError(
                f"{name!r} takes weights from the target's files, so it needs a describe()"
            )

        def make(parts: MethodParts) -> Proposer:
            if not callable(getattr(made, "propose", None)):
                raise UsageError(f"method {name}: its class has no propose(self, state, draft)")
            parts = replace(parts, speculation=_own(parts.speculation))
            return cast(Proposer, PluggedMethod(name, made, parts))

        def describe(place: DraftPlace) -> Draft:
            with blamed(f"method {name}", "describe"):
                found: Draft = cast(Any, own)(replace(place, speculation=_own(place.speculation)))
            if not hasattr(found, "max_k"):
                told = f"method {name}: describe should return a Draft, not {found!r:.60}"
                raise UsageError(told, "see models.draft.Draft")
            return found

        on_host = flag(f"method {name}", "runs_on_host", getattr(made, "runs_on_host", False))
        code = Method(make, text_bytes, own and describe, on_host)
        remembers = not _defines(made, "begin") and not getattr(made, "is_paged", False)
        remembers = remembers and (_defines(made, "prefill") or _defines(made, "commit"))
        choice = MethodChoice(_words(made), weights_from, may_remember=remembers, code=code)
        add(METHODS, name, choice)
        return made

    return register


def rule(name: str) -> Callable[[Made], Made]:
    """Return a decorator that registers a class as an acceptance rule."""

    def register(made: Made) -> Made:
        _check(name, made)

        def make(speculation: Any) -> PluggedRule:
            with blamed(f"acceptance {name}", "making it"):
                return PluggedRule(name, built(made, _own(speculation)))

        add(RULES, name, RuleChoice(_words(made), code=Rule(make)))
        return made

    return register


def policy(name: str) -> Callable[[Made], Made]:
    """Return a decorator that registers a class as a length policy."""

    def register(made: Made) -> Made:
        _check(name, made)

        def make(speculation: Any) -> PluggedPolicy:
            with blamed(f"length policy {name}", "making it"):
                return PluggedPolicy(name, built(made, _own(speculation)))

        add(POLICIES, name, Choice(_words(made), code=make))
        return made

    return register


def _check(name: object, made: object) -> None:
    """Raise `ValueError` unless the decorator's name can be written in options and recipes, and it
    decorates a class."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r:.60} is no name: use letters, digits, '_' and '-' only")
    if not isinstance(made, type):
        raise ValueError(f"{name!r} should be a class, but is a {type(made).__name__}")


def _defines(made: type[Any], name: str) -> bool:
    """Return whether a method's class has a member of its own that `Proposer` also has."""
    return getattr(made, name, None) not in (None, getattr(Proposer, name))


def _own(speculation: SpeculationSection) -> SpeculationSection:
    """Return a copy of the recipe's section with options that a plugin may change."""
    options = WatchedOptions(speculation.options)
    return speculation.model_copy(update={"options": options})


def _words(made: type[Any]) -> str:
    """Return a short description of a class for lists: the first line of its docstring, and its
    file."""
    file = Path(getattr(sys.modules.get(made.__module__), "__file__", None) or made.__module__)
    own = " ".join((made.__doc__ or "").strip().partition("\n")[0].split())
    return f"{one_line(own)} ({file.name})" if own else f"from the plugin {file.name}"


def digests() -> dict[str, str]:
    """Return the SHA-256 of each loaded plugin by its file's name. If files have the same name,
    enough of their folders is prepended to distinguish them."""

    def name(path: Path) -> str:
        ends = (path.parts[-n:] for n in count(1))
        return "/".join(next(e for e in ends if sum(o.parts[-len(e) :] == e for o in LOADED) == 1))

    return {name(path): digest for path, digest in LOADED.items()}


def load(file: str) -> None:
    """Run a plugin file, at most once per process. Raises `UsageError` if it fails or registers
    nothing."""
    path = Path(os.path.realpath(file))  # `resolve` fails at loops of symbolic links
    if path in LOADED:
        return
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UsageError(f"--plugin {file}: cannot be read: {reason}") from problem
    spec = importlib.util.spec_from_file_location(f"specdec_plugin_{len(LOADED)}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--plugin {file}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    before = len(METHODS) + len(RULES) + len(POLICIES)
    try:
        spec.loader.exec_module(module)
    except SpecdecError:
        raise
    except (Exception, SystemExit) as problem:
        told = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise UsageError(
            f"--plugin {file}{_line(problem, path)}: {told}", "-v shows where"
        ) from problem
    if len(METHODS) + len(RULES) + len(POLICIES) == before:
        raise UsageError(f"--plugin {file}: registers nothing", "see docs/methods.md")
    LOADED[path] = digest  # last, so that a file that failed fails again in the next run


def _line(problem: BaseException, path: Path) -> str:
    """Return the line of the plugin in which an error occurred, such as `:12`; empty if unknown."""
    if isinstance(problem, SyntaxError) and problem.lineno is not None:
        return f":{problem.lineno}"
    lines = [
        f.lineno for f in traceback.extract_tb(problem.__traceback__) if f.filename == str(path)
    ]
    return f":{lines[-1]}" if lines else ""
