"""The faults that `scripts/proofs/mutants.py` plants fit the code, and their tests exist."""

import ast
from functools import cache
from pathlib import Path

from scripts.proofs.faults.fault import Fault, all_faults

ROOT = Path(__file__).parents[2]
PACKAGES = ("specdec_cli", "kernels/specdec_kernels")


@cache
def functions(file: str) -> set[str]:
    return {
        node.name
        for node in ast.parse((ROOT / file).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


def test_every_fault_can_be_planted() -> None:
    """Its lines are in the file once, and Python can read the file with the others."""
    for fault in all_faults():
        ast.parse(fault.planted((ROOT / fault.file).read_text()), fault.name)


def test_their_tests_exist() -> None:
    for fault in all_faults():
        for test in fault.tests:
            file, _, function = test.partition("::")
            assert not function or function in functions(file), f"{fault.name}: {test}"


def test_no_folder_of_the_code_is_without_one() -> None:
    found = all_faults()
    assert len(found) >= 150 and len({(f.file, f.old, f.new) for f in found}) == len(found)
    planted = {Path(fault.file).parent for fault in found}
    for package in PACKAGES:
        for folder in {p.relative_to(ROOT).parent for p in (ROOT / package).rglob("*.py")}:
            code = [p for p in (ROOT / folder).glob("*.py") if p.name != "__init__.py"]
            assert not code or folder in planted, folder


def test_lines_that_changed_are_told() -> None:
    fault = Fault("a.py:1", "a.py", "x = 1\n", "x = 2\n", ())
    assert fault.planted("y = 0\nx = 1\n") == "y = 0\nx = 2\n"
    for text in ("xx = 1\n", "x = 1\nx = 1\n"):
        try:
            fault.planted(text)
        except ValueError as problem:
            assert "a.py:1" in str(problem)
        else:
            raise AssertionError(text)
