"""Write prompts that the demo target continues while speculators are trained for it.

    python scripts/demo_pair/signatures.py --out PROMPTS.jsonl

They are signatures with docstrings of this Python's standard library, as those of prompts.py, but
none comes from a held-out module.
"""

import argparse
import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path

from corpus import HELDOUT, SEED, SKIP_STDLIB, STDLIB
from prompts import definitions, prompt_of

LETTERS = (100, 900)


def prompts_of(path: Path) -> Iterator[str]:
    """The prompts of a file; none if it is not text, or not Python of this version."""
    try:
        text = path.read_text(encoding="utf-8")
        body = ast.parse(text).body
    except (ValueError, SyntaxError):
        return
    for node, parent in definitions(body):
        prompt = prompt_of(text.split("\n"), node, parent)
        if prompt and LETTERS[0] <= len(prompt) <= LETTERS[1]:
            yield prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found: dict[str, None] = {}
    for path in sorted(STDLIB.rglob("*.py")):
        parts = path.relative_to(STDLIB).parts
        stems = {Path(part).stem.removeprefix("test_") for part in parts}
        if not stems & (HELDOUT.keys() | SKIP_STDLIB):
            found.update(dict.fromkeys(prompts_of(path)))
    prompts = list(found)
    random.Random(SEED).shuffle(prompts)
    args.out.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    print(len(prompts), "prompts")


if __name__ == "__main__":
    main()
