"""docs/options.md agrees with the command line, independent of the terminal that generates it."""

import re

import pytest
from typer.testing import CliRunner

from scripts.docs.options import PAGE, page
from specdec_cli.app import app
from specdec_cli.commands.options import OPTION_KEYS


def sections() -> dict[str, str]:
    """The page's text for each command, by the command's name without `specdec`."""
    parts = re.split(r"^## specdec ?", page(), flags=re.M)[1:]
    return {part.partition("\n")[0]: part for part in parts}


def test_the_page_is_fresh() -> None:
    is_fresh = PAGE.read_text(encoding="utf-8") == page()
    assert is_fresh, "docs/options.md is stale: run `python scripts/docs/options.py`"


@pytest.mark.parametrize("width", ["30", "200"])
def test_terminals_do_not_change_the_page(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = page()
    for name in ("COLUMNS", "TERMINAL_WIDTH"):
        monkeypatch.setenv(name, width)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert page() == before


def test_help_shows_what_the_page_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    found = sections()
    assert {"generate", "sweep-k", "compare-tp", "profile-blocks", "recipe show"} <= found.keys()
    assert not any("ranks" in command for command in found), "hidden commands stay hidden"
    for command, section in found.items():
        shown = CliRunner().invoke(app, [*command.split(), "--help"]).output
        listed = set(re.findall(r"`(--[a-z-]+)`", section))
        assert listed or "COMMAND`" in section, command
        assert {name for name in listed if name not in shown} == set(), command


def test_every_option_that_sets_a_key_is_listed() -> None:
    whole = page()
    assert [flag for flag, _ in OPTION_KEYS.values() if f"`{flag}`" not in whole] == []
