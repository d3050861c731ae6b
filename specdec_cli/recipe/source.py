"""Reads YAML text into plain data, with the line of every key.

Scalars follow YAML 1.2's core schema: `on`, `no` and `12:30` are strings, `012` is twelve, and
`1e-3` is a number.
"""

import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from specdec_cli.errors import UsageError
from specdec_cli.text import is_unicode

MAX_BYTES = 1_000_000
MAX_NODES = 20_000  # keys and values
MAX_EXPANDED = 100_000  # keys and values after alias expansion

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in one line of a document. key: the dotted key with the problem, or empty."""

    line: int
    key: str
    what: str


@dataclass(frozen=True, slots=True)
class Document:
    """The data of a YAML text, the line of each key, and the problems found so far."""

    name: str
    data: object
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def line_of(self, path: KeyPath) -> int:
        """Return the line of the key, or else of the innermost section around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


_CORE_SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
)


def _add_core_scalars(target: type[yaml.SafeLoader] | type[yaml.SafeDumper]) -> None:
    for tag, pattern, first in _CORE_SCALARS:
        starts = ["" if char == "\0" else char for char in first]
        target.add_implicit_resolver(
            f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"), starts
        )


class _Loader(yaml.SafeLoader):
    """A YAML loader that only builds a tree of nodes, so that no tag can run code. `_Walk` turns
    the nodes into data."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._composed = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._composed += 1
        if self._composed > MAX_NODES:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            line = event.start_mark.line + 1
            raise _Refused(line, f"more than {MAX_NODES:,} keys and values, not a recipe")
        return super().compose_node(parent, index)


class Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes text so that both YAML 1.1 readers and this module read it back as
    text."""


_Loader.yaml_implicit_resolvers = {}  # drop PyYAML's implicit types, which are those of YAML 1.1
_add_core_scalars(_Loader)
_add_core_scalars(Dumper)


class _Walk:
    """Turns a tree of YAML nodes into data in one pass, and collects the problems that it
    finds."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self._open: set[int] = set()
        self._seen = 0

    def data(self, node: yaml.Node, path: KeyPath) -> object:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        # Count long text as several nodes: aliases can repeat it and make the recipe huge.
        self._seen += 1 + (len(node.value) // 16 if isinstance(node, yaml.ScalarNode) else 0)
        if self._seen > MAX_EXPANDED:
            raise _Refused(line, "too large once its aliases are expanded")
        if id(node) in self._open:
            raise _Refused(line, "an alias refers to a node that contains it")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                _refuse_tag(node, "seq")
                return [self.data(item, (*path, i)) for i, item in enumerate(node.value)]
            return _scalar(node)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        _refuse_tag(node, "map")
        result: dict[str, object] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(Problem(line, dotted(path), "a key should be plain text"))
                continue
            key = key_node.value
            if not is_unicode(key):
                what = "a key should be valid Unicode text"
                self.problems.append(Problem(line, dotted((*path, key)), what))
                continue
            if key in first_lines:
                what = f"duplicate key (first given on line {first_lines[key]})"
                self.problems.append(Problem(line, dotted((*path, key)), what))
                continue
            first_lines[key] = line
            self.lines[(*path, key)] = line
            result[key] = self.data(value_node, (*path, key))
        return result


class _Refused(Exception):
    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line, self.what = line, what


def _refuse_tag(node: yaml.Node, kind: str) -> None:
    if node.tag != f"tag:yaml.org,2002:{kind}":
        raise _Refused(node.start_mark.line + 1, f"the tag {node.tag} is not allowed")


def _scalar(node: yaml.Node) -> object:
    text, kind = str(node.value), node.tag.removeprefix("tag:yaml.org,2002:")
    try:
        match kind:
            case "str":
                return text
            case "null":
                return None
            case "bool":
                return {"true": True, "false": False}[text.lower()]
            case "int":
                return int(text)
            case "float":
                return float(re.sub(r"\.(inf|nan)\Z", r"\1", text, flags=re.IGNORECASE))
    except (KeyError, ValueError):  # such as `!!int x`, or more digits than `int` accepts
        raise _Refused(node.start_mark.line + 1, f"not a readable {kind}") from None
    raise _Refused(node.start_mark.line + 1, f"the tag {node.tag} is not allowed")


def dotted(path: KeyPath) -> str:
    """Write a key's path with dots, such as `sampling.stop[0]` for `("sampling", "stop", 0)`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def parse(text: str, name: str) -> Document:
    """Read one YAML document. Raises `UsageError` with file and line if it cannot be read."""
    walk = _Walk()
    try:
        node = yaml.compose(text, _Loader)
        data = None if node is None else walk.data(node, ())
    except _Refused as refused:
        raise UsageError(f"{name}:{refused.line}: {refused.what}") from None
    except RecursionError:
        raise UsageError(f"{name}:1: nested too deeply to be a recipe") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise UsageError(f"{name}:{line}: not valid YAML: {_in_words(error)}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"a character that YAML does not allow (U+{ord(text[error.position]):04X})"
        raise UsageError(f"{name}:{line}: {what}") from None
    return Document(name, data, walk.lines, tuple(walk.problems))


def _in_words(error: yaml.MarkedYAMLError) -> str:
    """Return the parser's error message, reworded if the original is unclear."""
    context, problem = error.context or "", error.problem or "not valid"
    if "'\\t' that cannot start any token" in problem:
        return "a tab where only spaces are allowed"
    if context.startswith("found duplicate anchor"):
        return context.partition(";")[0]
    return problem


def parse_value(text: str, name: str) -> object:
    """Parse the value of `--set KEY=VALUE`: a YAML scalar, list or mapping. name: the prefix of
    error messages. Raises `UsageError` if the value is not valid."""
    try:
        document = parse(text, name)
    except UsageError as error:
        what = error.message.partition(":1: ")[2] or error.message
        raise UsageError(f"{name}: {what}", "quote the value as YAML text: KEY='\"...\"'") from None
    if document.problems:
        problem = document.problems[0]
        raise UsageError(f"{name}: {problem.key}: {problem.what}")
    return document.data


def value_text(value: object) -> str:
    """Write a value as text that `parse_value` reads back as an equal value."""
    # JSON would not do: its escapes for characters above U+FFFF are not valid in YAML.
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=MAX_BYTES)
    return text.removesuffix("\n").removesuffix("\n...")


def read(path: Path, name: str) -> Document:
    """Read a YAML file of at most 1 MB. Raises `UsageError` for anything but a regular file."""
    try:
        if path.is_dir():
            raise UsageError(f"{name}: is a directory, not a recipe file")
        if not path.is_file():
            raise UsageError(f"{name}: not a regular file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{name}: larger than {MAX_BYTES:,} bytes, not a recipe")
    return parse(decoded(raw, name), name)


def decoded(raw: bytes, name: str) -> str:
    """Decode the content of a file, without its byte order mark. Raises `UsageError`, with the
    line, if it is not UTF-8."""
    raw = raw.removeprefix(BOM_UTF8)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name}:{line}: not UTF-8 text") from None
