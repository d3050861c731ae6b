"""Gaps in the list of planted faults: modules without a fault, and faults that no longer fit.

Runs no tests.
"""

import ast
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from scripts.proofs.faults.fault import Fault

PACKAGES = ("specdec_cli", "kernels/specdec_kernels")
_STATEMENT = re.compile(r"(?m)^(?=[A-Za-z_@])")  # begins at the top of a module


def modules_without(faults: Sequence[Fault], root: Path) -> list[str]:
    """The modules that have functions but no fault. Constants and records of fields need none."""
    planted = {fault.file for fault in faults}
    modules = (p for package in PACKAGES for p in sorted((root / package).rglob("*.py")))
    others = (p for p in modules if p.relative_to(root).as_posix() not in planted)
    return [p.relative_to(root).as_posix() for p in others if _has_code(p.read_text())]


def _has_code(text: str) -> bool:
    """True if a function of a module has more than a docstring."""
    return any(
        not (isinstance(one, ast.Pass) or _is_constant(one))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        for one in node.body
    )


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def misfits(faults: Sequence[Fault], root: Path) -> list[str]:
    """The faults that cannot be planted, are not Python, occur twice, or name a test that does not
    exist."""
    found, seen = [], set[tuple[str, str, str]]()
    for fault in faults:
        if not (root / fault.file).is_file():
            found.append(f"{fault.name}: there is no such file")
            continue
        try:
            planted = fault.planted(_text(root / fault.file))
        except ValueError as problem:
            found.append(str(problem))
            continue
        if not _is_python(planted, fault):
            found.append(f"{fault.name}: its new lines are no Python{fault.change}")
        if (same := (fault.file, fault.old, fault.new)) in seen:
            found.append(f"{fault.name}: it is there twice")
        seen.add(same)
        for test in fault.tests:
            file, _, function = test.partition("::")
            if not (root / file).is_file() or (
                function and function not in _functions(root / file)
            ):
                found.append(f"{fault.name}: there is no {test}")
    return found


def _is_python(planted: str, fault: Fault) -> bool:
    """True if Python can parse the statement that holds a fault, or else the whole file."""
    at = planted.find(fault.new) if fault.new else 0
    begins = [match.start() for match in _STATEMENT.finditer(planted)]
    first = max((b for b in begins if b <= at), default=0)
    last = min((b for b in begins if b >= at + max(1, len(fault.new))), default=len(planted))
    for text in (planted[first:last], planted):
        try:
            ast.parse(text)
        except SyntaxError:
            continue
        return True
    return False


@cache
def _text(file: Path) -> str:
    return file.read_text()


@cache
def _functions(file: Path) -> set[str]:
    return set(re.findall(r"(?m)^def (\w+)\(", _text(file)))
