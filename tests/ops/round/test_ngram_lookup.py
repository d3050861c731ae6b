"""Lookup of n-grams: the reference and the kernel against the definition in plain Python."""

import pytest
import specdec_kernels.round.steps_triton as steps_triton
import torch
from specdec_kernels import ops
from specdec_kernels.round.steps_triton import ngram_lookup_triton

both = pytest.mark.parametrize("lookup", [ops.ngram_lookup.reference, ngram_lookup_triton])


def by_definition(text, longest, shortest, room):
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + room]
    return []


def history_of(texts, device, width):
    """A row for each text, in another order and among other rows; the rest must not be read."""
    history = torch.full((2 * len(texts) + 1, width + 3), 10**6, dtype=torch.int32)
    rows = [2 * len(texts) - 1 - 2 * i for i in range(len(texts))]
    for row, text in zip(rows, texts, strict=True):
        history[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
    return history.to(device)[:, :width], torch.tensor(rows, device=device)


def check(lookup, texts, rooms, longest, shortest, k, device):
    history, rows = history_of(texts, device, max(map(len, texts)) + k)
    length = torch.tensor([len(text) for text in texts], device=device)
    found, lens = lookup(
        history, rows, length, torch.tensor(rooms, device=device), longest, shortest, k
    )
    assert found.shape == (len(texts), k) and found.dtype == lens.dtype == torch.int64
    for b, (text, room) in enumerate(zip(texts, rooms, strict=True)):
        want = by_definition(text, longest, shortest, room)
        assert int(lens[b]) == len(want)
        assert found[b].tolist() == want + [0] * (k - len(want))


@both
@pytest.mark.parametrize(("longest", "shortest"), [(1, 1), (3, 1), (3, 2), (4, 4), (9, 1)])
@pytest.mark.parametrize("block", [16, 64, 2048])
def test_lookup_follows_the_definition(lookup, longest, shortest, block, device, monkeypatch):
    """Texts have few different tokens, and some are longer than the kernel reads at once."""
    monkeypatch.setattr(steps_triton, "PLACES", block)
    generator = torch.Generator().manual_seed(longest)
    k = 5
    texts, rooms = [], []
    for number in range(24):
        length = int(torch.randint(1, 90, (), generator=generator))
        words = torch.randint(0, 2 + number % 7, (length,), generator=generator)
        texts.append(words.tolist())
        rooms.append(int(torch.randint(0, k + 1, (), generator=generator)))
    check(lookup, texts, rooms, longest, shortest, k, device)


@both
def test_the_first_of_the_longest(lookup, device):
    texts = [
        [2, 8, 1, 2, 9, 1, 2],  # 1 2 occurs once before, 2 alone earlier
        [7, 7, 7, 7],  # the first match of the longest suffix overlaps it
        [1, 2, 3],
        [5],
        [0, 0],  # token 0 is an ordinary token
        [3, 1, 1, 2, 3, 1],
    ]
    check(lookup, texts, [4] * len(texts), 3, 1, 4, device)
    check(lookup, texts, [1, 0, 2, 3, 1, 2], 2, 2, 3, device)


@both
@pytest.mark.parametrize("k", [1, 3, 16])
def test_one_long_text(lookup, k, device):
    """The match lies at the beginning of the text, or at the last possible place."""
    text = list(range(5000))
    check(lookup, [[9000, *text, 9000], [*text, 4999]], [k, k], 4, 1, k, device)
