"""Tests in forks, `pytest --jobs`: each is told of once, and one that ends its worker fails."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SPEAKS = """
import os, pytest

@pytest.mark.parametrize("line", range(40))
def test_hears_itself(line, capfd, tmp_path):
    os.system(f"echo {__name__} {line}")
    assert capfd.readouterr().out == f"{__name__} {line}\\n"
"""
FAILS = """
def test_fails():
    print("said before")
    assert "as" == "told"
"""
ENDS = """
import os, time, pytest

@pytest.mark.dist
def test_leaves_a_process():
    if not os.fork():
        time.sleep(20), os._exit(0)

@pytest.mark.dist
def test_ends_the_worker():
    os._exit(0)
"""


def test_what_is_told(tmp_path: Path) -> None:
    files = {"speaks": SPEAKS, "speaks_too": SPEAKS, "fails": FAILS, "ends": ENDS}
    for name, code in files.items():
        (tmp_path / f"test_{name}.py").write_text(code)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = dist")
    plugins = ["-p", "tests.jobs", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-rA", *plugins, "--jobs", "2"]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    output = tmp_path / "output.txt"  # a pipe would end with the process that a test leaves
    with output.open("w") as out:
        done = subprocess.run(command, cwd=tmp_path, env=environ, stdout=out, timeout=120)
    assert done.returncode == 1
    lines = output.read_text().splitlines()
    told = [line for line in lines if line.startswith(("PASSED", "FAILED"))]
    assert len(told) == len(set(told)) == 83
    assert {line for line in told if line.startswith("FAILED")} == {
        "FAILED test_fails.py::test_fails - AssertionError: assert 'as' == 'told'",
        "FAILED test_ends.py::test_ends_the_worker - its worker ended with exit code 0",
    }
    assert lines.count("said before") == 1
