"""Fixtures that the tests of commands share."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specdec_cli import demo
from specdec_cli.experiment import machine, points
from tests.cli.generate_helpers import Run, generate


@pytest.fixture(scope="module", autouse=True)
def calm_machine() -> Iterator[None]:
    """Silence warnings about other work: tests count lines, and others may use the processor.

    A ratio of speeds that no speculation reaches is kept, too. `unit/test_noise.py` tests the
    warnings, and `unit/test_points.py` such ratios.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.MachineWatch, "notices", lambda _: [])
        patch.setattr(points, "_BEYOND", float("inf"))
        yield


@pytest.fixture(scope="module")
def small_demo(small_models: Path) -> Iterator[None]:
    """Let `demo:target` and `demo:draft` be smaller: tests of commands spend most on their passes.

    The real pair runs in the tests of `generate`, and in `engine/test_demo_pair.py`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "FOLDER", small_models)
        yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `specdec generate` with these arguments in this process."""
    return lambda *arguments: generate(capsys, *arguments)


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    """Writes records to a file of prompts."""

    def write(*records: object) -> Path:
        path = tmp_path / "p.jsonl"
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        return path

    return write
