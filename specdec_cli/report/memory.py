"""Draws a memory profile: a stacked bar for each rank."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec_cli.report.drawings.canvas import without_display
from specdec_cli.report.write import write_file
from specdec_cli.terminal.memory import PARTS, parts

_GIB = 2**30


def write_memory_picture(document: Mapping[str, Any], file: Path) -> None:
    """Draw a memory profile and write it to `file` as PNG.

    document: the JSON document that `profile-blocks --json` prints.
    Raises `ImportError` without matplotlib, and `SetupError` if the file cannot be written.
    """
    without_display()
    from matplotlib.figure import Figure

    ranks = document["ranks"]
    figure = Figure(figsize=(8.2, 1.9 + 0.42 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    held = [parts(rank, document["num_blocks"]) for rank in ranks]
    left = [0.0] * len(ranks)
    places = list(range(len(ranks)))
    for name, _, colour, _ in PARTS:
        widths = [sizes[name] / _GIB for sizes in held]
        if any(widths):
            axes.barh(places, widths, left=left, color=colour, label=name, height=0.62)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(places, [f"rank {rank['rank']}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    axes.set_xlim(0, max(left))
    axes.set_title(
        f"{document['num_blocks']:,} KV blocks of {document['block_size']} tokens "
        f"({document['method']})",
        fontsize=10,
        loc="left",
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    write_file(file, buffer.getvalue())
