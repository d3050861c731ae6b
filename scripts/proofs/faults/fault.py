"""Planted faults: changes of a line or a few, each with the tests near it, read from data files.

A file has blocks like this one, separated by blank lines. Without new lines the old ones are
removed:

    file specdec_cli/engine/loop.py
    near tests/engine/test_rounds.py::test_right_for_the_first_j
    -            seq.target_kv = n + accepted
    +            seq.target_kv = n + accepted + 1

Knows nothing of how tests run.
"""

import ast
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Fault:
    """name: the file and the fault's number in it. old, new: whole lines; the code has `old` once.
    tests: arguments of pytest; one of these tests has to fail with the fault.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """The text of the file with the fault. Raises ValueError unless `old` is there once."""
        places = [at.start() for at in re.finditer(f"(?m)^(?={re.escape(self.old)})", text)]
        if len(places) != 1:
            raise ValueError(f"{self.name}: its lines are there {len(places)} times, not once")
        return text[: places[0]] + self.new + text[places[0] + len(self.old) :]

    @property
    def change(self) -> str:
        """Its lines, for a reader."""
        signed = [f"\n    -{line}" for line in self.old.splitlines()]
        return "".join(signed + [f"\n    +{line}" for line in self.new.splitlines()])

    def key(self, root: Path) -> str:
        """A digest of the fault, the code that it is planted into, and its tests. Comments and
        docstrings do not count."""
        files = [self.file, *(test.partition("::")[0] for test in self.tests)]
        said = [self.old, self.new, *self.tests, *(code_of(root / f) for f in files)]
        return sha256("\0".join(said).encode()).hexdigest()[:16]


@cache
def code_of(file: Path) -> str:
    """The code of a Python file, without comments and docstrings; the text of any other."""
    text = file.read_text()
    if file.suffix != ".py":
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
    return ast.dump(tree)


def all_faults() -> list[Fault]:
    """All faults, one file after the other."""
    numbers = Counter[str]()
    found = []
    for room in sorted(FOLDER.glob("*.txt")):
        for block in room.read_text().split("\n\n"):
            lines = block.splitlines()
            said = {word: rest for word, _, rest in (line.partition(" ") for line in lines)}
            file = said["file"]
            numbers[file] += 1
            old, new = (
                "".join(f"{line[1:]}\n" for line in lines if line.startswith(sign)) for sign in "-+"
            )
            name = f"{file}:{numbers[file]}"
            found.append(Fault(name, file, old, new, tuple(said["near"].split())))
    return found
