"""The report in docs/demo-sweep and the table in docs/sweep.md are what the samples there give."""

from scripts.docs.demo_sweep import FOLDER, PAGE, recomputed, with_table
from specdec_cli.errors import LOGGED
from specdec_cli.report.export import markdown

_STALE = "stale: run `python scripts/docs/demo_sweep.py`"


def test_the_pages_are_what_the_samples_give() -> None:
    """Pictures are left out, whose bytes depend on versions of the library that draws them."""
    LOGGED.clear()  # warnings of commands that ran before in this process
    written = (FOLDER / "report.md").read_text(encoding="utf-8").splitlines()
    with recomputed() as (content, table):
        expected = markdown(content, (), "").splitlines()
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page, table), _STALE
    rest = iter(written)
    missing = [line for line in expected if line not in rest]
    assert not missing, _STALE
    assert all(f"demo:{arm}" in page for arm in ("draft", "eagle3"))
