"""Commands in a process that cannot import torch, transformers, or matplotlib for a display."""

import subprocess
import sys
from pathlib import Path

from tests.cli.generate_helpers import environment

_CODE = """
import sys

class Forbids:
    def find_spec(self, name, *_):
        heavy = name.partition('.')[0] in ('torch', 'transformers') or name == 'matplotlib.pyplot'
        assert not heavy, name

sys.meta_path.insert(0, Forbids())
from specdec_cli.app import main
print(int(main(sys.argv[1:])))
"""


def without_torch(*command: str | Path) -> int:
    """The exit code of a command that needs none of them."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *map(str, command)],
        env=environment() | {"MPLBACKEND": "x"},
        capture_output=True,
        check=True,
        text=True,
    )
    return int(done.stdout.splitlines()[-1])
