"""The reports of sweeps in docs, and their tables on pages, are what the samples there give."""

import pytest

from scripts.docs import comparison
from scripts.docs.sweep_pages import DOCS, SWEEPS, Sweep
from specdec_cli.errors import LOGGED
from specdec_cli.report.export import markdown

_STALE = "stale: run `python scripts/docs/sweep_pages.py`"
_SMOLLM2 = ("demo:smollm2-eagle3", *(f"smollm2-{n}" for n in ("mtp", "dspark", "dflash")), "ngram")
_REAL = ("smollm2", "smollm2-sampled", "smollm2-cpu", "smollm2-cpu-sampled")
_ARMS = dict.fromkeys(_REAL, _SMOLLM2)
_ARMS["demo-sweep"] = ("demo:draft", "demo:eagle3", "ngram")
# Tables of the page that compares methods that one sweep gives.
_TABLES = {
    "smollm2": {
        "categories": lambda found: comparison.categories(found, 1),
        "categories-32": lambda found: comparison.categories(found, 32),
    },
    "smollm2-cpu": {"categories-cpu": lambda found: comparison.categories(found, 1)},
    "demo-methods": {"demo": comparison.lengths},
}
_ARMS["demo-methods"] = ("demo:mtp", "demo:dspark", "demo:dflash", "demo:peagle", "ngram")
_LARGE = {"smollm2", "smollm2-sampled", "smollm2-cpu-sampled"}  # in 13 categories


@pytest.mark.parametrize(
    "sweep",
    [pytest.param(s, id=s.name, marks=[pytest.mark.slow] * (s.name in _LARGE)) for s in SWEEPS],
)
def test_the_pages_are_what_the_samples_give(sweep: Sweep) -> None:
    """Pictures are left out, whose bytes depend on versions of the library that draws them."""
    LOGGED.clear()  # warnings of commands that ran before in this process
    written = (sweep.folder / "report.md").read_text(encoding="utf-8").splitlines()
    with sweep.recomputed() as (content, table):
        expected = markdown(content, (), "").splitlines()
    if sweep.page is not None:
        page = (DOCS / sweep.page).read_text(encoding="utf-8")
        assert page == sweep.with_table(page, table), _STALE
    compared, found = comparison.PAGE.read_text("utf-8"), comparison.grouped(content.run.points)
    for name, make in _TABLES.get(sweep.name, {}).items():
        assert compared == comparison.written(compared, name, make(found)), comparison.__doc__
    rest = iter(written)
    missing = [line for line in expected if line not in rest]
    assert not missing, _STALE
    assert all(arm in "\n".join(written) for arm in _ARMS[sweep.name])


def test_a_table_takes_the_place_of_the_one_before() -> None:
    page = "a\n<!-- table: t -->\n| old |\n|---|\n| 1 |\n\nb | c\n"
    lines = comparison.table("x | y", [[1, "z"]])
    assert lines == ["| x | y |", "|---|---|", "| 1 | z |"]
    changed = comparison.written(page, "t", lines)
    assert changed == "a\n<!-- table: t -->\n| x | y |\n|---|---|\n| 1 | z |\n\nb | c\n"
    assert comparison.written(changed, "t", lines) == changed
    with pytest.raises(ValueError, match="no place for the table u"):
        comparison.written(page, "u", lines)
