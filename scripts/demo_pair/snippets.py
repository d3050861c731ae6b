"""Cut prompts out of the training files, which the target continues while a head is trained.

They are signatures with docstrings, like those of prompts.py, but none comes from a held-out
module. Prompts that share a run of tokens with held-out text are left out. Writes
`pack/prompts.bin.xz` (uint16 ids, every prompt followed by eos).
"""

import argparse
import ast
import lzma
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from corpus import SEED, Doc, read
from pack import BASE, INVERSE, encode, members, powers, window_hashes
from prompts import TOKENS, definitions, prompt_of
from tokenizers import Tokenizer

COUNT = 40_000
SKIP = ("manual", "stdlib-test")


def prompts_of(doc: Doc) -> Iterator[str]:
    lines = doc.text.split("\n")
    for node, parent in definitions(ast.parse(doc.text).body):
        if text := prompt_of(lines, node, parent):
            yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".corpus"))
    args = parser.parse_args()
    pack = args.work / "pack"
    docs = [doc for doc in read(args.work / "docs.jsonl") if doc.group not in SKIP]
    random.Random(SEED).shuffle(docs)
    docs.sort(key=lambda doc: doc.group != "stdlib")  # the demo's own kind of text comes first
    tokenizer = Tokenizer.from_file(str(pack / "tokenizer" / "tokenizer.json"))
    heldout = encode(tokenizer, read(args.work / "heldout.jsonl"))
    longest = max(map(len, heldout))
    ascending, inverse = powers(BASE, longest), powers(INVERSE, longest)
    banned = np.unique(np.concatenate([window_hashes(x, ascending, inverse) for x in heldout]))
    seen: set[bytes] = set()
    kept: list[np.ndarray] = []
    shared = 0
    for doc in docs:
        texts = [Doc(doc.group, doc.path, text) for text in prompts_of(doc)]
        for ids in encode(tokenizer, texts):
            key = ids.tobytes()
            if key in seen or not TOKENS[0] <= len(ids) <= TOKENS[1]:
                continue
            seen.add(key)
            if members(window_hashes(ids, ascending, inverse), banned).any():
                shared += 1
            else:
                kept.append(np.append(ids, np.uint16(0)))
        if len(kept) >= COUNT:
            break
    stream = np.concatenate(kept).astype("<u2")
    (pack / "prompts.bin.xz").write_bytes(lzma.compress(stream.tobytes(), preset=6))
    print(len(kept), "prompts,", len(stream), "tokens,", shared, "left out for held-out text")


if __name__ == "__main__":
    main()
