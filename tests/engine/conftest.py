"""Models that the tests of engines share."""

from pathlib import Path

import pytest

from tests import lossless
from tests.support import save_noised, save_tiny


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft that agrees with it about half of the time."""
    folder = tmp_path_factory.mktemp("pair")
    target = save_tiny(folder / "target", "llama")
    return target, save_noised(folder / "draft", target)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft with a vocabulary of 8 tokens."""
    return lossless.save_eight(tmp_path_factory.mktemp("eight"))
