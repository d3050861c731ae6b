"""Shows a memory profile on the terminal: a table with a column per rank, a bar per rank, and
conclusions.

All figures come from the document of `profile-blocks --json`; only the lengths of the bars'
parts are computed here.
"""

import sys
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from specdec_cli.terminal.render import console, has_colour, plain_table, table_width
from specdec_cli.text import counted, inert, say

Document = Mapping[str, Any]

# The parts of a rank's memory: the name, the letter that stands for it on terminals without
# colours, the colour (from Okabe and Ito's palette), and the key of its bytes in a rank's record.
PARTS = (
    ("target weights", "T", "#0072b2", "target_weight_bytes"),
    ("draft weights", "D", "#e69f00", "draft_weight_bytes"),
    ("activations", "a", "#cc79a7", "activation_bytes"),
    ("graphs", "g", "#8a5fbf", "graph_bytes"),
    ("target KV", "K", "#56b4e9", "target_block_bytes"),
    ("draft KV", "k", "#f0e442", "draft_block_bytes"),
    ("stranded", "!", "#d55e00", "stranded_bytes"),
    ("other", "o", "#777777", "other_bytes"),
    ("free", ".", "#cccccc", "free_bytes"),
)
_WIDTH = 72


def parts(rank: Document, num_blocks: int) -> dict[str, int]:
    """Return the bytes of each part of a rank's memory, in the order of `PARTS`. They add up to the
    rank's total."""
    return {
        name: rank[key] * (num_blocks if key.endswith("block_bytes") else 1)
        for name, _, _, key in PARTS
    }


def cells(sizes: Mapping[str, int], width: int) -> dict[str, int]:
    """Return how many character cells of a bar each part gets, in proportion to its size. A part
    that would fill at least a tenth of a cell gets at least one."""
    total = sum(sizes.values())
    found = {
        name: max(round(width * size / total), int(10 * width * size >= total))
        for name, size in sizes.items()
    }
    while (excess := sum(found.values()) - width) and max(found.values()) > 1:
        widest = max(found, key=lambda name: found[name])
        found[widest] -= 1 if excess > 0 else -1
    return found


def print_profile(document: Document) -> None:
    """Print a profile on stdout."""
    out = console(sys.stdout)
    num_blocks = document["num_blocks"]
    table = _table(document)
    width = table_width(table)
    out.width = max(out.width, width.minimum if sys.stdout.isatty() else width.maximum)
    out.print(table)
    out.print()
    tinted = has_colour(sys.stdout)
    shown: set[str] = set()
    for rank in document["ranks"]:
        sizes = parts(rank, num_blocks)
        shown |= {name for name, size in sizes.items() if size > 0}
        out.print(_bar(f"rank {rank['rank']} ", sizes, tinted=tinted))
    legend = Text()
    for name, letter, colour, _ in PARTS:
        if name in shown:
            legend.append("█" if tinted else letter, colour if tinted else None)
            legend.append(f" {name}  ")
    out.print(legend)
    out.print()
    for line in answers(document):
        say(line, sys.stdout)
    if document.get("points"):
        out.print()
        points = _points(document["points"])
        out.width = max(out.width, table_width(points).maximum)
        out.print(points)
        skipped = [p["reason"] for p in document["points"] if p["status"] == "skipped"]
        for reason in dict.fromkeys(skipped):
            say(f"skipped: {reason}", sys.stdout)


def answers(document: Document) -> list[str]:
    """Return the conclusions from the profile, one sentence each."""
    fit, context = document["fit"], document["context"]
    found = [
        f"{document['num_blocks']:,} blocks of {document['block_size']} tokens fit "
        f"({document['method']}): {document['max_tokens']:,} tokens, or "
        f"{document['max_sequences']:,} sequences of {context:,} tokens."
    ]
    if len(document["ranks"]) > 1:
        limiting = document["limiting_rank"]
        stranded = sum(r["stranded_bytes"] for r in document["ranks"] if r["rank"] != limiting)
        found.append(
            f"Rank {limiting} has the least room; {size(stranded)} are stranded on the others."
        )
    if (asked := fit["recipe_blocks"]) is not None:
        excess = ", more than fit" if asked > document["num_blocks"] else ""
        found.append(f"The recipe asks for {asked:,} blocks (cache.num_blocks){excess}.")
    batch = f"The recipe's batch of {fit['batch_size']} at {context:,} tokens"
    if fit["fits"]:
        found.append(f"{batch} fits: it needs {fit['needed_blocks']:,} blocks.")
    else:
        found.append(f"{batch} does not fit: it needs {fit['needed_blocks']:,} blocks.")
        found += [f"  {line}" for line in fit["advice"]]
    cost = document["draft_cost"]
    if cost is not None:
        found.append(f"The target alone would hold {cost['target_alone']['max_tokens']:,} tokens.")
        for row in cost["by_draft_tp"]:
            if row["status"] == "ok":
                found.append(
                    f"With the draft on {counted(row['draft_tp'], 'rank')}, it would hold "
                    f"{row['max_tokens']:,} ({100 * row['lost_share']:.1f} % less)."
                )
            else:
                found.append(f"The draft on {counted(row['draft_tp'], 'rank')}: {row['reason']}.")
    return found


def size(count: int) -> str:
    """Write a number of bytes in a readable unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count} B"


def _table(document: Document) -> Table:
    """Make the table, with a column for each rank."""
    table, ranks = plain_table(), document["ranks"]
    held = [parts(rank, document["num_blocks"]) for rank in ranks]
    rows = {
        name: [size(h[name]) for h in held]
        for name, *_ in PARTS
        if name not in ("target KV", "draft KV", "stranded", "free")
    }
    for label, key in (
        ("left for KV", "kv_budget_bytes"),
        ("target block", "target_block_bytes"),
        ("draft block", "draft_block_bytes"),
    ):
        rows[label] = [size(rank[key]) for rank in ranks]
    rows["blocks that fit"] = [f"{rank['num_blocks']:,}" for rank in ranks]
    rows["stranded"] = [size(rank["stranded_bytes"]) for rank in ranks]
    rows["not to be used"] = [size(rank["free_bytes"]) for rank in ranks]
    rows["total"] = [size(rank["total_bytes"]) for rank in ranks]
    table.add_column("", style="bold", no_wrap=True, min_width=max(map(len, rows)))
    for place, rank in enumerate(ranks):
        # If many ranks make the table too wide, cells are wrapped but words are not cut.
        least = max(len(word) for row in rows.values() for word in row[place].split())
        name = f"rank {rank['rank']} {inert(rank['device'])}"
        table.add_column(name, justify="right", min_width=least)
    for label, row in rows.items():
        table.add_row(label, *row)
    return table


def _bar(label: str, sizes: Mapping[str, int], *, tinted: bool) -> Text:
    counts = cells(sizes, _WIDTH)
    text = Text(label)
    for name, letter, colour, _ in PARTS:
        text.append(("█" if tinted else letter) * counts[name], colour if tinted else None)
    return text


def _points(points: list[Document]) -> Table:
    names = ("draft TP", "k", "block", "utilization", "blocks", "tokens", "sequences", "rank")
    has_memory = any("device_memory_bytes" in point for point in points)
    table = plain_table(*(["memory"] if has_memory else []), *names)
    table.add_column("")
    for point in points:
        settings = [size(point["device_memory_bytes"])] if has_memory else []
        settings += [
            str(point["draft_tp"] or "–"),
            str(point["k"]),
            str(point["block_size"]),
            f"{point['gpu_memory_utilization']:g}",
        ]
        found = [""] * 4
        if point["status"] != "skipped":
            counts = (point[name] for name in ("num_blocks", "max_tokens", "max_sequences"))
            found = [*(f"{count:,}" for count in counts), str(point["limiting_rank"])]
        fate = {"ok": "", "skipped": "skipped"}.get(point["status"], "nothing fits")
        table.add_row(*settings, *found, fate)
    return table
