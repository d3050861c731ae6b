"""Command lines of the docs that start ranks: over two of them, at small size."""

import pytest

from tests.launch.forks import over_forks
from tests.unit.test_docs_examples import LINES, OVER_RANKS, small
from tests.unit.test_docs_examples import stand_ins as stand_ins

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    "line", [pytest.param(line, id=page) for page, line in LINES if OVER_RANKS.search(line)]
)
@pytest.mark.usefixtures("stand_ins", "no_pixels")
def test_command_lines_run(line: str) -> None:
    words = [word for word in small(line) if word not in ("--dry-run", "--estimate")]
    for option in {"--target-tp", "--draft-tp"} & set(words):
        place = words.index(option) + 1
        words[place] = words[place].replace(",4", "").replace("4", "2")
    if words[0] == "compare-tp":
        words += ["--max-new-tokens", "3", "--batch-size", "1", "--batches", "1"]
    result = over_forks(*words)
    assert result.code == 0, result.err
