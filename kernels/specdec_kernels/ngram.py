"""Proposals that are looked up in what a sequence holds already: torch reference.

Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): what followed the longest suffix of a text
that occurred before, of several occurrences the first one. Legend: B sequences, R rows of L tokens,
K proposal length.
"""

import torch
from torch import Tensor


def ngram_lookup_reference(
    history: Tensor,
    rows: Tensor,
    length: Tensor,
    room: Tensor,
    longest: int,
    shortest: int,
    k: int,
) -> tuple[Tensor, Tensor]:
    """See `ops.ngram_lookup`."""
    proposed = torch.zeros(len(rows), k, dtype=torch.int64, device=history.device)
    lens = torch.zeros_like(length)
    for b, (row, count) in enumerate(zip(rows.tolist(), length.tolist(), strict=True)):
        text = history[row, :count]
        start = _follower(text, longest, shortest)
        found = text[start : start + int(room[b])]
        proposed[b, : len(found)] = found
        lens[b] = len(found)
    return proposed, lens


def _follower(text: Tensor, longest: int, shortest: int) -> int:
    """Where the first earlier occurrence of the longest suffix ends; the text's end for none."""
    held, width = text.cpu().numpy().tobytes(), text.itemsize
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        suffix, at = held[-n * width :], -1
        while True:
            at = held.find(suffix, at + 1, len(held) - width)
            if at % width == 0:
                return at // width + n
            if at < 0:
                break
    return len(text)
