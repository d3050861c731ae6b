"""The command that goes on with an interrupted run."""

from pathlib import Path

import pytest

from specdec_cli.commands.options import Asked
from specdec_cli.commands.resuming import say_kept
from specdec_cli.launch.world import Place


def test_what_no_folder_keeps_is_said_again(capsys: pytest.CaptureFixture[str]) -> None:
    plugins = ["a.py", "b c.py"]
    place, output = Place(("specdec_cli", "sweep-k"), None, None), Path("runs/a")
    asked = Asked(place, {}, "demo", plugin=plugins, threads=2, output=output, quiet=True)
    say_kept("3 samples", asked, "sweep-k", server=["http://h:1"], baseline=None, strict=True)
    told = "sweep-k --resume -o runs/a --plugin a.py --plugin 'b c.py' --threads 2"
    told += " --server http://h:1 --strict --quiet"
    assert f"3 samples are kept in runs/a\ngo on with: specdec {told}\n" == capsys.readouterr().err
