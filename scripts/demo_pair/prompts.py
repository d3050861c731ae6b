"""Cut the demo prompts out of the held-out standard library modules.

A prompt is a signature with its docstring (and the class line above a method). It ends just after
the docstring, and the model writes the body.
"""

import argparse
import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path

from corpus import HELDOUT, SEED, Doc, read
from tokenizers import Tokenizer

COUNT = 200
TOKENS = (30, 250)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(
    body: list[ast.stmt], parent: ast.ClassDef | None = None
) -> Iterator[tuple[Definition, ast.ClassDef | None]]:
    """Top-level functions and classes, and the methods of those classes."""
    for node in body:
        if isinstance(node, Definition):
            yield node, parent
        if isinstance(node, ast.ClassDef) and parent is None:
            yield from definitions(node.body, node)


def prompt_of(lines: list[str], node: Definition, parent: ast.ClassDef | None) -> str | None:
    """The head of a definition; None without a docstring or without code after it."""
    if ast.get_docstring(node) is None or len(node.body) < 2:
        return None
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    last = node.body[0].end_lineno
    assert last is not None
    if node.body[1].lineno <= last:
        return None
    head = lines[first - 1 : last]
    if parent is not None:
        head = [lines[parent.lineno - 1], *head]
        if not head[0].rstrip().endswith(":"):
            return None
    return "\n".join(head) + "\n"


def candidates(doc: Doc, tokenizer: Tokenizer) -> list[dict[str, str]]:
    module = Path(doc.path).stem
    lines = doc.text.split("\n")
    rows = []
    for node, parent in definitions(ast.parse(doc.text).body):
        prompt = prompt_of(lines, node, parent)
        if prompt and TOKENS[0] <= len(tokenizer.encode(prompt).ids) <= TOKENS[1]:
            name = ".".join([module, *([parent.name] if parent else []), node.name])
            rows.append({"prompt": prompt, "category": HELDOUT[module], "source": name})
    return rows


def select(by_module: dict[str, list[dict[str, str]]]) -> list[dict[str, str]]:
    """COUNT prompts, drawn evenly from the categories and in turn from the modules of each."""
    categories = sorted(set(HELDOUT.values()))
    taken: dict[str, list[dict[str, str]]] = {c: [] for c in categories}
    pools = {
        c: [list(rows) for m, rows in sorted(by_module.items()) if HELDOUT[m] == c]
        for c in categories
    }
    seen: set[str] = set()
    while sum(map(len, taken.values())) < COUNT and any(any(pools[c]) for c in categories):
        category = min((c for c in categories if any(pools[c])), key=lambda c: len(taken[c]))
        pool = next(rows for rows in pools[category] if rows)
        row = pool.pop()
        pools[category].remove(pool)
        pools[category].append(pool)
        if row["prompt"] not in seen:
            seen.add(row["prompt"])
            taken[category].append(row)
    return sorted(
        (row for rows in taken.values() for row in rows),
        key=lambda row: (row["category"], row["source"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".corpus"))
    parser.add_argument("--out", type=Path, default=Path("specdec_cli/demo/prompts.jsonl"))
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.work / "pack" / "tokenizer" / "tokenizer.json"))
    rng = random.Random(SEED)
    by_module = {}
    for doc in read(args.work / "heldout.jsonl"):
        rows = candidates(doc, tokenizer)
        rng.shuffle(rows)
        by_module[Path(doc.path).stem] = rows
    rows = select(by_module)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    lengths = sorted(len(tokenizer.encode(row["prompt"]).ids) for row in rows)
    print(len(rows), "prompts; tokens", lengths[0], lengths[len(lengths) // 2], lengths[-1])
    print({m: len(rows) for m, rows in by_module.items()})
    print({c: sum(r["category"] == c for r in rows) for c in sorted(set(HELDOUT.values()))})


if __name__ == "__main__":
    main()
