"""Makes a checked `Recipe` from a recipe's name and overrides, and writes it back as YAML.

This module handles precedence, the origin of each value, and the bundled recipes. It does not know
which options, models and devices exist; callers name the option that each override came from.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

import specdec_cli
from specdec_cli.errors import UsageError
from specdec_cli.recipe import problems
from specdec_cli.recipe.schema import (
    INNER_SECTIONS,
    OPEN_SECTIONS,
    Recipe,
    key_fields,
    section_models,
)
from specdec_cli.recipe.source import Document, Dumper, KeyPath, dotted, read
from specdec_cli.text import inert, one_line, shown

DEMO_RECIPE = "demo"
PROMPTS = "prompts.jsonl"  # where a run folder stores prompts that are not from a file or dataset
EVERY_DTYPE = "*.dtype"  # an override with this key sets the dtype of every model in the recipe

_MODEL_KEYS = ("target.model", "draft.model")
_SHAPES = "shapes/"  # a folder next to the bundled recipes, of models with only a config.json
_MAX_SHOWN = 50
_HINT = "`specdec recipe schema` lists the keys and their allowed values"


@dataclass(frozen=True, slots=True)
class BundledRecipe:
    """A recipe shipped with specdec. description: the first comment line of its file."""

    name: str
    path: Path
    description: str


def bundled_folder() -> Path:
    """Return the folder of bundled recipes: inside the package if specdec is installed, next to the
    package in a source checkout."""
    package = Path(specdec_cli.__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def bundled_recipes() -> list[BundledRecipe]:
    """List all bundled recipes. Demo recipes come first, and recipes with random weights last."""
    return [
        BundledRecipe(path.stem, path, _first_comment(path))
        for path in sorted(
            bundled_folder().glob("*.yaml"),
            key=lambda path: (_rank(path.stem), path.stem),
        )
    ]


def _rank(name: str) -> int:
    """Return a sort key that puts demo recipes first and recipes with random weights last."""
    return 0 if name.startswith("demo") else 2 if name.startswith("bench-") else 1


def find_bundled(name: str) -> BundledRecipe | None:
    """Return the bundled recipe with this name, which may end in `.yaml`; None if there is none."""
    stem = name.removesuffix(".yaml")
    return next((recipe for recipe in bundled_recipes() if recipe.name == stem), None)


def is_bundled(source: str | None) -> bool:
    """Return True if `load_recipe` reads this source, or the demo recipe for None, from the folder
    of bundled recipes."""
    path = find_source(DEMO_RECIPE if source is None else source)
    return path.resolve().parent == bundled_folder().resolve()


def _first_comment(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()


def load_recipe(
    source: str | None = None,
    overrides: Mapping[str, object] | None = None,
    origins: Mapping[str, str] | None = None,
    overridden: Mapping[str, object] | None = None,
) -> Recipe:
    """Load a recipe file or bundled recipe, apply `overrides` (dotted key to value), and check the
    result.

    source: a file, or the name of a bundled recipe. If None, the demo recipe is loaded, or only the
        defaults if `overrides` name a target.
    origins: the option that each override came from, such as `--temperature`; used in messages.
    overridden: values from `--set` that another option replaces. They are not used, but they are
        still checked, like the values in the file that an override replaces.

    Raises a single `UsageError` that lists all problems, one per line.
    """
    overrides = dict(overrides or {})
    if source is None and not _names_target(overrides):
        source = DEMO_RECIPE
    document = Document("recipe", {}) if source is None else read_source(source)
    name = document.name
    found = [_Found(p.line, f"{name}:{p.line}", p.key, p.what) for p in document.problems]
    if document.data is not None and not isinstance(document.data, dict):
        what = f"a recipe is a mapping of sections, not {shown(document.data)}"
        raise UsageError(f"{name}:{document.line_of(())}: {what}", _HINT)
    data = document.data if isinstance(document.data, dict) else {}

    merge = _Merge(document, data, origins or {})
    merge.apply(overrides)
    found += merge.problems
    recipe = None
    try:
        recipe = Recipe.model_validate(merge.data)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            path = problems.place(details)
            line, where = merge.where(path)
            found.append(_Found(line, where, dotted(path), details))
    merge.problems.clear()
    for key, value in (overridden or {}).items():
        merge.check(key, value, 0, "--set")
    found += merge.problems
    if recipe is not None and not found:
        return recipe
    found.sort(key=lambda problem: problem.line)
    lines = [_said(problem) for problem in found[:_MAX_SHOWN]]
    if len(found) > _MAX_SHOWN:
        lines.append(f"and {len(found) - _MAX_SHOWN} more problems")
    raise UsageError("\n".join(lines), _HINT)


@dataclass(frozen=True, slots=True)
class _Found:
    """A problem in a recipe. Its message is written later, because only the first `_MAX_SHOWN`
    problems are shown."""

    line: int
    where: str
    key: str
    what: str | ErrorDetails


def _said(found: _Found) -> str:
    what = found.what if isinstance(found.what, str) else problems.describe(found.what)
    key = f"{one_line(found.key)}: " if found.key else ""
    return f"{found.where}: {key}{what}"


def dump_recipe(recipe: Recipe) -> str:
    """Write a recipe as YAML that `load_recipe` reads back as an equal recipe. Control characters
    are escaped."""

    def dumped(allow_unicode: bool) -> str:
        data = recipe.model_dump(mode="json")
        return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=allow_unicode)

    text = dumped(True)
    return text if inert(text) == text else dumped(False)


def read_source(source: str) -> Document:
    """Read a recipe file or a bundled recipe, and make its relative paths absolute."""
    path = find_source(source)
    document = read(path, source if Path(source).is_file() else str(path))
    if isinstance(document.data, dict):
        for key in (*_MODEL_KEYS, "data.path", "data.chat_template", "load.arrivals"):
            section, _, last = key.partition(".")
            values = document.data.get(section)
            if isinstance(values, dict) and last in values:
                if key == "load.arrivals" and _is_process(values[last]):
                    continue
                values[last] = _own_prompts(values[last], path) or _located(
                    values[last], [path.parent]
                )
    return document


def _is_process(value: object) -> bool:
    """Return True if this value of `load.arrivals` names a process, even if a file has the same
    name."""
    return value in ("poisson", "constant") or str(value).startswith("gamma:")


def _own_prompts(value: object, recipe: Path) -> str | None:
    """Return the absolute path of the prompts file that a run folder stores next to its recipe.
    Returns None if the recipe is not in a run folder, or if `value` names another file."""
    own = recipe.parent / PROMPTS
    is_run = recipe.name == "recipe.yaml" and (recipe.parent / "environment.json").is_file()
    return os.path.abspath(own) if is_run and value == PROMPTS and own.is_file() else None


_OF_PROMPTS = {".jsonl", ".txt", ".csv", ".tsv", ".parquet"}


def find_source(source: str) -> Path:
    """Find the path of a recipe: a file, or else a bundled recipe. Raises `UsageError` if there is
    none, or if the source is a folder or a file of prompts."""
    try:
        path = Path(source)
        if path.exists() and not path.is_dir():
            if path.suffix in _OF_PROMPTS:
                told = f"{source}: a {path.suffix} file is not a recipe"
                raise UsageError(told, "prompts go after --prompt-file; a recipe is a .yaml file")
            return path
    except (OSError, ValueError):
        raise UsageError(f"{source!r} cannot be the path of a recipe") from None
    if bundled := find_bundled(source):
        return bundled.path
    if path.is_dir():
        inside = path / "recipe.yaml"
        raise UsageError(
            f"{source}: is a directory, not a recipe file",
            f"a run folder's recipe is {inside}" if inside.is_file() else None,
        )
    if " " in source.strip():
        told = f"{source}: no such recipe, neither a file nor a bundled one"
        raise UsageError(told, "a prompt goes after --prompt: --prompt 'TEXT'")
    names = [recipe.name for recipe in bundled_recipes()]
    close = get_close_matches(path.name.removesuffix(".yaml"), names, n=1)
    guess = f" (did you mean {close[0]}?)" if close else ""
    hint = "`specdec recipe ls` lists the bundled recipes"
    if "/" in source or ":" in source:
        hint = f"a model goes after --target or --draft, prompts after --prompt-file; {hint}"
    raise UsageError(f"{source}: no such recipe, neither a file nor a bundled one{guess}", hint)


class _Merge:
    """Applies overrides to a document's data, and remembers which option each one came from."""

    def __init__(
        self, document: Document, data: Mapping[str, object], origins: Mapping[str, str]
    ) -> None:
        self.document = document
        self.data = {
            key: dict(value) if isinstance(value, dict) else value for key, value in data.items()
        }
        self.problems: list[_Found] = []
        self._names = origins
        self._origins: dict[str, str] = {}
        self._replaced: set[KeyPath] = set()

    def apply(self, overrides: Mapping[str, object]) -> None:
        # Apply whole sections first, so that `draft=null` and `draft.model=x` work in either order.
        for key in sorted(overrides, key=lambda key: key.count(".")):
            if key != EVERY_DTYPE:
                self._set(key, overrides[key], self._names.get(key, "override"))
        for section in ("target", "draft"):
            # Drop a replaced model's revision and file, which do not apply to the new model.
            values = self.data.get(section)
            for key in ("revision", "file"):
                is_new = f"{section}.model" in overrides and f"{section}.{key}" not in overrides
                if is_new and isinstance(values, dict):
                    values.pop(key, None)
            if EVERY_DTYPE in overrides and isinstance(self.data.get(section), dict):
                origin = self._names.get(EVERY_DTYPE, "override")
                self._set(f"{section}.dtype", overrides[EVERY_DTYPE], origin)

    def where(self, path: KeyPath) -> tuple[int, str]:
        """Return where a key's value came from, as a line number and a text for messages.

        For a value from an option, the line is 0, which sorts first, and the text is the option.
        For a value from the file, the text is "FILE:LINE". If the key is in neither, but an option
        created the section around it or set a key inside it, this option is returned.
        """
        lines = self.document.lines
        for depth in range(len(path), 0, -1):
            key = dotted(path[:depth])
            if key in self._origins:
                return 0, self._origins[key]
            if path not in lines and (made := self._made(key)):
                return 0, made
            if path[:depth] in lines and str(path[0]) not in self._origins:
                break
        line = self.document.line_of(path)
        return line, f"{self.document.name}:{line}"

    def _made(self, section: str) -> str | None:
        """Return an option that set a key in this section, if the section is not in the file;
        otherwise None."""
        data = self.document.data
        if isinstance(data, dict) and isinstance(data.get(section), dict):
            return None
        inside = (name for key, name in self._origins.items() if key.startswith(f"{section}."))
        return next(inside, None)

    def _set(self, key: str, value: object, origin: str) -> None:
        known = {**key_fields(), **section_models(), **INNER_SECTIONS}
        if key not in known and not key.startswith(OPEN_SECTIONS):
            self.problems.append(_Found(0, origin, key, problems.unknown_key(key)))
            return
        self._origins[key] = origin
        if key in _MODEL_KEYS:
            value = _located(value, [])
        *sections, last = key.split(".")
        values, path = self.data, tuple(key.split("."))
        for section in sections:
            inner = values.get(section)
            if inner is not None and not isinstance(inner, dict):
                return  # reported when the whole recipe is checked
            values[section] = inner = dict(inner or {})
            values = inner
        around = {path[:depth] for depth in range(1, len(path) + 1)}
        is_own = path in self.document.lines and around.isdisjoint(self._replaced)
        if last in values and is_own:
            line = self.document.line_of(path)
            self.check(key, values[last], line, f"{self.document.name}:{line}")
        values[last] = value
        self._replaced.add(path)

    def check(self, key: str, value: object, line: int, where: str) -> None:
        """Record a problem if a value that an override has replaced is not valid for its key.

        line, where: where the value came from, as returned by the method `where`.
        """
        fields = key_fields()
        if key not in fields:
            is_known = key in {**section_models(), **INNER_SECTIONS}
            if is_known and isinstance(value, dict):
                for inner, one in value.items():
                    self.check(f"{key}.{inner}", one, line, where)
            elif not is_known and not key.startswith(OPEN_SECTIONS):
                self.problems.append(_Found(line, where, key, problems.unknown_key(key)))
            return
        kind: Any = Annotated[fields[key].annotation, fields[key]]
        try:
            TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
        except ValidationError as error:
            for details in error.errors(include_url=False):
                path = (*key.split("."), *details["loc"])
                details["loc"] = path
                self.problems.append(_Found(line, where, dotted(path), details))


def _names_target(overrides: Mapping[str, object]) -> bool:
    section = overrides.get("target")
    return "target.model" in overrides or (isinstance(section, dict) and "model" in section)


def _located(value: object, folders: Sequence[Path]) -> object:
    """Make a relative path absolute if it exists in one of `folders` but not in the current folder.

    A path that starts with `shapes/` is also looked up next to the bundled recipes. That folder
    contains model folders with only a config.json.
    """
    if not isinstance(value, str) or not value:
        return value
    if value.startswith(_SHAPES):
        folders = [*folders, bundled_folder()]
    try:
        if not Path(value).exists():
            for folder in folders:
                if (folder / value).exists():
                    return str((folder / value).resolve())
    except (OSError, ValueError):  # the value is too long, or not a path at all
        return value
    return value
