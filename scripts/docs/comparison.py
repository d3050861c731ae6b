"""Writes the tables of docs/comparison.md from the samples beside it.

    python scripts/docs/comparison.py

The sweeps are those of sweep_pages.py, which has their commands and draws the pictures. Each
method is shown at its own fastest k. Prices are those of scripts/bench/prices.py.
"""

import argparse
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from scripts.bench import prices
from scripts.docs.sweep_pages import DOCS, SWEEPS
from specdec_cli.experiment.folders.records import Point

PAGE = DOCS / "comparison.md"
METHODS = {
    "eagle3": "EAGLE-3", "mtp": "MTP", "dspark": "DSpark", "dflash": "DFlash",
    "peagle": "P-EAGLE", "draft": "draft", "ngram": "n-grams",
}  # fmt: skip
Points = list[Point]
By = Mapping[tuple[int, str], Points]  # batch size, method


def method_of(draft: str) -> str:
    return METHODS[re.split("[:-]", draft)[-1]]


def grouped(points: Iterable[Point]) -> By:
    """The measured points of each method, in the order of `METHODS`."""
    found: dict[tuple[int, str], Points] = {}
    order = list(METHODS.values())
    known = [p for p in points if p.k > 0 and p.draft is not None and p.speedup is not None]
    for p in sorted(known, key=lambda p: (p.batch_size, order.index(method_of(p.draft or "")))):
        found.setdefault((p.batch_size, method_of(p.draft or "")), []).append(p)
    return found


def fastest(points: Points) -> Point:
    return max(points, key=lambda p: p.speedup or 0.0)


def with_ends(value: float | None, ends: tuple[float, float] | list[float] | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" + (f" ({ends[0]:.2f}–{ends[1]:.2f})" if ends else "")


def table(columns: str, rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of Markdown. columns: their titles, separated by bars."""
    head = f"| {columns} |"
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return [head, "|" + "---|" * (columns.count("|") + 1), *lines]


def bold(text: str, is_best: bool) -> str:
    return f"**{text}**" if is_best else text


def best(greedy: By, sampled: By) -> list[str]:
    """Each method at its fastest k."""
    rows = []
    for (size, name), points in greedy.items():
        p = fastest(points)
        assert p.metrics is not None
        m = p.metrics
        even = p.break_even.tokens_per_round if p.break_even is not None else None
        row = [size, name, p.k, with_ends(p.speedup, p.speedup_ci), f"{m.tokens_per_round:.2f}"]
        rest = (m.round_ms or 0) - (m.draft_ms or 0) - (m.verify_ms or 0)
        times = [m.draft_ms or 0.0, m.verify_ms or 0.0, rest]
        row += [" + ".join(f"{ms:.2f}" for ms in times), f"{even or 0:.2f}"]
        if (other := sampled.get((size, name))) is not None:
            q = fastest(other)
            row += [q.k, with_ends(q.speedup, q.speedup_ci)]
        rows.append(row)
    columns = (
        "batch | method | k | x plain | tokens a round | ms: draft + score + rest | break-even"
    )
    return table(columns + (" | k at 0.7 | x plain at 0.7" if sampled else ""), rows)


def categories(found: By, size: int) -> list[str]:
    """The speed-up of each method by category, at its fastest k over all. The best one is bold."""
    bests = {name: fastest(points) for (at, name), points in found.items() if at == size}
    names = sorted({c for p in bests.values() for c in p.per_category})
    rows = []
    for category in names:
        speeds = [p.per_category[category].speedup or 0.0 for p in bests.values()]
        cells = [bold(f"{x:.2f}" if x else "–", x == max(speeds)) for x in speeds]
        count = next(iter(bests.values())).per_category[category].num_prompts
        rows.append([f"{category} ({count})", *cells])
    return table(" | ".join(["prompts", *(f"{n}, k = {p.k}" for n, p in bests.items())]), rows)


def positions(greedy: By, sampled: By) -> list[str]:
    """The share of rounds that accept the proposal at each position, at the largest k."""
    rows, most = [], 0
    for (size, name), points in greedy.items():
        if size != 1:
            continue
        cells = []
        for some in (points, sampled.get((size, name), [])):
            if some:
                p = max(some, key=lambda p: p.k)
                assert p.metrics is not None
                shares = p.metrics.acceptance_rate_per_pos or []
                most = max(most, p.k)
                cells.append(" ".join(f"{100 * share:.0f}" for share in shares))
        rows.append([name, *cells])
    told = f"accepted at 1 to {most}, %"
    return table(f"method | {told}" + (" | at 0.7" if sampled else ""), rows)


def priced(run: Path) -> list[str]:
    """Each method at its fastest k on larger models, if it is accepted as often as here."""
    found = prices.samples(run / "samples.jsonl.xz")
    lengths = {method_of(arm): prices.lengths_of(found, arm) for arm in {s["draft"] for s in found}}
    rows: dict[tuple[str, str], list[str]] = {}
    sizes = []
    for stages in prices.read_stages():
        sizes.append(stages.batch_size)
        plain = 1000 * stages.batch_size / stages.round_ms(None, 0)
        rows.setdefault((stages.model, "plain"), []).append(f"{plain:.0f} tokens/s")
        of_model = {name: lengths[name] for name in METHODS.values() if name in lengths}
        found_prices = {n: prices.best_price(stages, n, known) for n, known in of_model.items()}
        most = max(price.ratio for price in found_prices.values())
        for name, price in found_prices.items():
            told = bold(f"{price.ratio:.2f}", price.ratio == most)
            told += f" (k = {price.k}, {price.needed:.2f})"
            own = f"{name} †" if name in stages.reckoned else name
            rows.setdefault((stages.model, own), []).append(told)
    columns = " | ".join(["model", "method", *(f"batch {n}" for n in dict.fromkeys(sizes))])
    return table(columns, [[*key, *cells] for key, cells in rows.items()])


def lengths(found: By) -> list[str]:
    """Tokens a round of each method by k, and its fastest point."""
    ks = sorted({p.k for points in found.values() for p in points})
    rows = []
    for (_, name), points in found.items():
        by_k = {p.k: p for p in points}
        cells = [f"{m.tokens_per_round:.2f}" if (m := by_k[k].metrics) else "" for k in ks]
        p = fastest(points)
        rows.append([name, *cells, p.k, with_ends(p.speedup, p.speedup_ci)])
    told = " | ".join(f"k = {k}" for k in ks)
    return table(f"method | {told} | fastest k | x plain", rows)


def written(page: str, name: str, lines: Iterable[str]) -> str:
    """The page with a table after its mark, in place of the present one."""
    mark = f"<!-- table: {name} -->\n"
    if mark not in page:
        raise ValueError(f"{PAGE.name} has no place for the table {name}")
    before, _, rest = page.partition(mark)
    after = re.sub(r"\A(\|.*\n)*", "", rest)
    return before + mark + "".join(f"{line}\n" for line in lines) + after


def main() -> None:
    by_name = {sweep.name: sweep for sweep in SWEEPS}

    @functools.cache
    def points(name: str) -> By:
        with by_name[name].recomputed() as (content, _):
            return grouped(content.run.points)

    makers: dict[str, Callable[[], list[str]]] = {
        "best": lambda: best(points("smollm2"), points("smollm2-sampled")),
        "categories": lambda: categories(points("smollm2"), 1),
        "categories-32": lambda: categories(points("smollm2"), 32),
        "positions": lambda: positions(points("smollm2"), points("smollm2-sampled")),
        "prices": lambda: priced(by_name["smollm2"].folder / "run"),
        "cpu": lambda: best(points("smollm2-cpu"), points("smollm2-cpu-sampled")),
        "categories-cpu": lambda: categories(points("smollm2-cpu"), 1),
        "demo": lambda: lengths(points("demo-methods")),
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    about = f"tables to write: {', '.join(makers)}; all if none is named"
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=about)
    names = parser.parse_args().tables
    if unknown := [name for name in names if name not in makers]:
        parser.error(f"no table {unknown[0]!r}; {', '.join(makers)}")
    page = PAGE.read_text(encoding="utf-8")
    for name in names or makers:
        page = written(page, name, makers[name]())
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
