"""Proposals that are looked up in a sequence's own tokens.

Legend: B sequences, R rows of L tokens, K proposal length.
"""

import torch
from torch import Tensor

from specdec_kernels.dispatch import kernel


@kernel("specdec_kernels.round.ngram_triton:ngram_lookup_triton")
def ngram_lookup(
    history: Tensor,
    rows: Tensor,
    length: Tensor,
    room: Tensor,
    longest: int,
    shortest: int,
    k: int,
) -> tuple[Tensor, Tensor]:
    """Propose the tokens that followed the first earlier occurrence of the longest suffix.

    Suffixes of `longest` down to `shortest` tokens are looked for (Saxena, "Prompt Lookup
    Decoding", 2023).

    Args:
        history: [R, L] int32, token ids; rows contiguous.
        rows, length: [B] int64, the row of each text, and its tokens.
        room: [B] int64, most tokens to find, 0..k.
        longest, shortest: 1 or more.
        k: 1 or more.

    Returns:
        found [B, k] int64, of which lens count, the others 0; lens [B] int64.
    """
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
    """The end of the first earlier occurrence of the longest suffix, or the text's end."""
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
