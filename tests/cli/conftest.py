"""What the tests of commands share."""

from collections.abc import Iterator

import pytest

from specdec_cli.experiment import machine


@pytest.fixture(scope="module", autouse=True)
def calm_machine() -> Iterator[None]:
    """Silence warnings about other work: tests count lines, and others may use the processor.

    `unit/test_noise.py` tests these warnings.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.MachineWatch, "notices", lambda _: [])
        yield


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip plots, which take longer to draw than small sweeps take to run."""
    for command in ("sweep_k", "merge"):
        monkeypatch.setattr(f"specdec_cli.commands.{command}.write_pictures", lambda folder: None)
