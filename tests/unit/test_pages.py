"""The pages: their links lead somewhere, and none is too long to be read."""

import re
from pathlib import Path

import pytest

from specdec_cli.core.figures import TTFT_PARTS, Metrics, Record
from specdec_cli.experiment.folders import conclusions, records
from specdec_cli.experiment.generation import Output
from specdec_cli.experiment.served import _REMARKS as REMARKS
from tests.support import FAMILIES, LATER_FAMILIES

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "scripts").glob("*/README.md")),
    *sorted((ROOT / "kernels").glob("*/*/README.md")),
]
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    titles = [line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#")]
    plain = [re.sub(r"[`*]|\[|\]\([^)]*\)", "", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        goal = (page.parent / name).resolve() if name else page
        assert goal.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(goal), f"{link}: {goal.name} has no such heading"


LONGEST = {"README.md": 150, "performance.md": 350}
GENERATED = {"options.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_is_too_long_to_be_read(page: Path) -> None:
    most = LONGEST.get(page.name, 400) if page.parent in (ROOT, ROOT / "docs") else 400
    if page.name not in GENERATED:
        assert len(page.read_text(encoding="utf-8").splitlines()) <= most


_RECORDS = (
    *(conclusions.Best, conclusions.BestPair, conclusions.Comparison, conclusions.CheckResult),
    *(conclusions.Decision, conclusions.MemoryCost, conclusions.Needed, conclusions.Tokens),
    *(records.BreakEven, records.CategoryMetrics, records.PairFacts, records.Point),
    *(records.Prediction, records.Sample, Metrics, Output),
)


@pytest.mark.parametrize("kind", _RECORDS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_document_is_described(kind: type[Record]) -> None:
    """A key that no page describes is one that nobody can rely on."""
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`([a-z0-9_]+)`", text))
    told |= {f"{name}_ci" for name in told if f"`{name}` and `_ci`" in text}
    assert set(kind.model_fields) - told == set()


def test_every_code_of_a_warning_is_on_a_page() -> None:
    code = "".join(f.read_text("utf-8") for f in (ROOT / "specdec_cli").rglob("*.py"))
    codes = {*re.findall(r'Notice\(\s*"(\w+)"', code), *REMARKS}
    told = {one for page in PAGES for one in re.findall(r"`(\w+)`", page.read_text("utf-8"))}
    assert len(codes) > 50 and codes - told == set()


def test_parts_of_the_first_token_are_named_as_they_are_printed() -> None:
    page = " ".join((ROOT / "docs" / "generate.md").read_text("utf-8").split())
    assert not [part for part in TTFT_PARTS.values() if f"`{part}`" not in page]


def test_the_number_of_families_is_that_of_the_tests() -> None:
    count = len(FAMILIES.keys() | LATER_FAMILIES)
    for page in ("README.md", "docs/correctness.md"):
        text = " ".join((ROOT / page).read_text("utf-8").split())
        assert f"{count} configurations" in text, page


def test_every_kind_of_document_is_described() -> None:
    files = (ROOT / "specdec_cli").rglob("*.py")
    kinds = {
        kind
        for f in files
        for kind in re.findall(r'"(specdec\.[a-z.-]+/\d+)"', f.read_text("utf-8"))
    }
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert len(kinds) > 8 and [kind for kind in sorted(kinds) if f"`{kind}`" not in text] == []
