"""Tokenise the corpus, remove overlaps with the held-out text, and write the binary files.

Writes `train.bin.xz` and `heldout.bin` (uint16 token ids, every document followed by eos) and
`meta.json` (segments of the train file with their sampling weights) under `pack/`.
"""

import argparse
import json
import lzma
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
from corpus import HELDOUT, SEED, Doc, read
from tokenizers import Tokenizer

Ids = npt.NDArray[np.uint16]
Hashes = npt.NDArray[np.uint64]

NGRAM = 50
BASE = 0x9E3779B97F4A7C15 | 1  # odd, so it has an inverse modulo 2**64
INVERSE = pow(BASE, -1, 1 << 64)
DROP_FILE = 0.05  # a file that shares a larger part of its tokens is dropped whole
SHORTEST = 64  # least tokens of a piece of a cut file
WEIGHTS = {"stdlib": 3.0, "stdlib-test": 0.5, "manual": 0.7, "package": 1.0}


def powers(base: int, count: int) -> Hashes:
    """base**0 .. base**(count-1) modulo 2**64."""
    out = np.full(count, base, np.uint64)
    out[0] = 1
    return np.cumprod(out, dtype=np.uint64)


def window_hashes(ids: Ids, ascending: Hashes, inverse: Hashes) -> Hashes:
    """A polynomial hash of every NGRAM-token window, [len(ids) - NGRAM + 1]."""
    if len(ids) < NGRAM:
        return np.empty(0, np.uint64)
    terms = (ids.astype(np.uint64) + np.uint64(1)) * ascending[: len(ids)]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
    return (sums[NGRAM:] - sums[:-NGRAM]) * inverse[: len(ids) - NGRAM + 1]


def members(hashes: Hashes, banned: Hashes) -> npt.NDArray[np.bool_]:
    """A mask of the hashes that are in the sorted array `banned`."""
    places = np.searchsorted(banned, hashes)
    return banned[np.minimum(places, len(banned) - 1)] == hashes


def encode(tokenizer: Tokenizer, docs: list[Doc]) -> list[Ids]:
    out: list[Ids] = []
    for start in range(0, len(docs), 256):
        batch = tokenizer.encode_batch_fast([d.text for d in docs[start : start + 256]])
        out += [np.array(e.ids, np.uint16) for e in batch]
    return out


def pieces(ids: Ids, shared: npt.NDArray[np.bool_]) -> list[Ids]:
    """The runs of `ids` outside all shared windows."""
    edges = np.flatnonzero(np.diff(np.concatenate([[1], shared.astype(np.int8), [1]])))
    runs = [ids[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return [run for run in runs if len(run) >= SHORTEST]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".corpus"))
    args = parser.parse_args()
    pack = args.work / "pack"
    tokenizer = Tokenizer.from_file(str(pack / "tokenizer" / "tokenizer.json"))
    heldout_docs, docs = read(args.work / "heldout.jsonl"), read(args.work / "docs.jsonl")
    heldout, train = encode(tokenizer, heldout_docs), encode(tokenizer, docs)

    longest = max(map(len, heldout + train)) + 1  # ids of a document, including its eos
    ascending, inverse = powers(BASE, longest), powers(INVERSE, longest)
    banned = np.unique(np.concatenate([window_hashes(x, ascending, inverse) for x in heldout]))
    eos = np.zeros(1, np.uint16)
    groups: dict[str, list[Ids]] = {name: [] for name in WEIGHTS}
    files_dropped: list[str] = []
    files_cut = tokens_cut = 0
    for doc, ids in zip(docs, train, strict=True):
        hits = np.flatnonzero(members(window_hashes(ids, ascending, inverse), banned))
        shared = np.zeros(len(ids), np.bool_)
        for hit in hits:
            shared[hit : hit + NGRAM] = True
        parts = [ids]
        if len(hits):
            tokens_cut += int(shared.sum())
            if shared.mean() > DROP_FILE:
                files_dropped.append(f"{doc.group} {doc.path}")
                continue
            files_cut += 1
            parts = pieces(ids, shared)
        groups[doc.group.split(":")[0]] += [np.concatenate([part, eos]) for part in parts]

    rng = random.Random(SEED)
    segments, stream = [], []
    start = 0
    for name, parts in groups.items():
        rng.shuffle(parts)
        size = sum(map(len, parts))
        segments.append({"name": name, "start": start, "tokens": size, "weight": WEIGHTS[name]})
        stream += parts
        start += size
    tokens = np.concatenate(stream)
    check = (window_hashes(part, ascending, inverse) for part in stream)
    if any(members(hashes, banned).any() for hashes in check):
        raise ValueError("held-out text is still in the training text")

    raw = tokens.astype("<u2").tobytes()
    (pack / "train.bin.xz").write_bytes(lzma.compress(raw, preset=6))
    held = np.concatenate([np.concatenate([ids, eos]) for ids in heldout])
    (pack / "heldout.bin").write_bytes(held.astype("<u2").tobytes())
    collected = json.loads((args.work / "collected.json").read_text())
    held_bytes = sum(len(d.text.encode()) for d in heldout_docs)
    meta = {
        "segments": segments,
        "train_tokens": len(tokens),
        "heldout_tokens": len(held),
        "heldout_bytes": held_bytes,
        "heldout_bytes_per_token": round(held_bytes / len(held), 4),
        "train_bytes": sum(g["bytes"] for g in collected["groups"].values()),
        "overlap": {
            "ngram": NGRAM,
            "files_dropped": files_dropped,
            "files_cut": files_cut,
            "tokens_shared": tokens_cut,
        },
        "heldout_modules": HELDOUT,
        "heldout_files": collected["heldout"],
        "groups": collected["groups"],
        "files_refused": collected["dropped"],
        "archives": collected["archives"],
        "seed": SEED,
    }
    (pack / "meta.json").write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps({k: meta[k] for k in ("segments", "train_tokens", "heldout_tokens")}))
    print("bytes per token", meta["heldout_bytes_per_token"], "overlap", meta["overlap"])
    for path in sorted(pack.iterdir()):
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
