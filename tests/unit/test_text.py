"""Foreign text on a terminal."""

import pytest

from specdec_cli.text import inert


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 日本 \t\n", "plain é 日本 \t\n"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\x00\x7f\x9b", "a\\rb\\x00\\x7f\\x9b"),
        ("\u202eevil\ud800", "\\u202eevil\\ud800"),
        ("[red]", "[red]"),
    ],
)
def test_inert(text: str, shown: str) -> None:
    assert inert(text) == shown
