"""The faults that `scripts/proofs/mutants.py` plants fit the code, and every module has one."""

from pathlib import Path

import pytest

from scripts.proofs.faults.check import misfits, modules_without
from scripts.proofs.faults.fault import Fault, all_faults

ROOT = Path(__file__).parents[2]


def test_every_fault_can_be_planted_and_has_its_tests() -> None:
    assert not misfits(all_faults(), ROOT)


def test_every_module_has_one() -> None:
    """`python scripts/proofs/mutants.py --only '*/NAME.py:*'` tries a module's faults."""
    assert not modules_without(all_faults(), ROOT)


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    for name, text in {
        "a.py": "def one() -> int:\n    x = 1\n    return x\n",
        "b.py": "def two() -> int:\n    return 2\n",
        "data.py": 'SIZE = 3\n\n\nclass Kind:\n    def of(self) -> None:\n        """Nothing."""\n',
    }.items():
        (tmp_path / "specdec_cli").mkdir(exist_ok=True)
        (tmp_path / "specdec_cli" / name).write_text(text)
    (tmp_path / "test_a.py").write_text("def test_one() -> None: ...\n")
    file, tests = "specdec_cli/a.py", ("test_a.py::test_one",)
    good = Fault("good", file, "    x = 1\n", "    x = 2\n", tests)
    assert modules_without([good], tmp_path) == ["specdec_cli/b.py"]
    bad = [
        Fault("gone", "specdec_cli/c.py", "x\n", "y\n", tests),
        Fault("moved", file, "    x = 3\n", "", tests),
        Fault("broken", file, "    x = 1\n", "    x = \n", tests),
        Fault("again", file, good.old, good.new, tests),
        Fault("untested", file, "    return x\n", "    return 0\n", ("test_a.py::test_two",)),
    ]
    told = misfits([good, *bad], tmp_path)
    assert [line.partition(":")[0] for line in told] == [fault.name for fault in bad]


def test_lines_that_changed_are_told() -> None:
    fault = Fault("a.py:1", "a.py", "x = 1\n", "x = 2\n", ())
    assert fault.planted("y = 0\nx = 1\n") == "y = 0\nx = 2\n"
    for text in ("xx = 1\n", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match=r"a\.py:1"):
            fault.planted(text)


def test_results_are_kept_until_code_changes(tmp_path: Path) -> None:
    keys = []
    for number, text in enumerate(('"""One."""\na = 1  # one\n', "a = 1\n", "a = 2\n")):
        root = tmp_path / str(number)
        root.mkdir()
        (root / "a.py").write_text(text)
        (root / "test_a.py").write_text('def test_one() -> None:\n    """Said."""\n')
        keys.append(Fault("a", "a.py", "a\n", "b\n", ("test_a.py::test_one",)).key(root))
    assert keys[0] == keys[1] != keys[2]
