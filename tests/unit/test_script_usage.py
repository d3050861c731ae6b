"""Scripts tell their usage and what they lack, though what they measure is not there."""

import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("peers/run_vllm.py --help", 0, "usage: run_vllm.py"),
        ("docs/comparison.py --help", 0, "categories-32"),
        ("docs/comparison.py best nope", 2, "error: no table 'nope'; best, "),
        (
            "docs/sweep_pages.py nope",
            "error: no sweep 'nope'; smollm2, smollm2-sampled, smollm2-cpu, smollm2-cpu-sampled, "
            "demo-methods, demo-sweep",
            "",
        ),
        ("bench/sampling.py --rows 1", "error: this measures a GPU, and torch finds none", ""),
        ("proofs/gpu.py", "error: these checks need a GPU, and torch finds none", ""),
    ],
)
def test_a_script_that_cannot_run(
    line: str,
    code: int | str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, *arguments = line.split()
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(str((SCRIPTS / name).parent))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    captured = capsys.readouterr()
    assert end.value.code == code and told in captured.out + captured.err
