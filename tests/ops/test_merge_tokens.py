import pytest
import torch
from ops_helpers import needs_cuda, starts_of
from specdec_kernels import ops
from specdec_kernels.ragged.merge_triton import merge_tokens_triton
from torch import Tensor

# Per row: tokens, valid ones of them, next tokens, capacity in the output.
ROWS = {
    "extend-by-one": [(3, 3, 1, 4), (5, 5, 1, 6), (1, 1, 1, 2)],
    "rejections": [(6, 2, 1, 7), (6, 6, 1, 7), (6, 1, 1, 7)],
    "nothing-valid": [(4, 0, 1, 5)],
    "nothing-next": [(4, 3, 0, 4), (2, 0, 0, 3)],
    "empty-rows": [(0, 0, 0, 0), (3, 2, 2, 4), (0, 0, 0, 0), (0, 0, 3, 5), (0, 0, 0, 0)],
    "no-tokens-at-all": [(0, 0, 2, 3)],
    "several-blocks": [(300, 211, 3, 307), (1, 1, 0, 1), (259, 259, 2, 261)],
}


def make_rows(rows: list[tuple[int, int, int, int]], device: torch.device) -> tuple[Tensor, ...]:
    sizes, kept, added, capacity = (list(column) for column in zip(*rows, strict=True))
    start, out_start = starts_of(sizes, device), starts_of(capacity, device)
    end = start[:-1] + torch.tensor(kept, dtype=torch.int32, device=device)
    tokens = torch.randint(100, 1000, (sum(sizes),), device=device)
    next_tokens = torch.full((len(rows), max(added) + 1), -7, device=device)
    for b, count in enumerate(added):
        next_tokens[b, :count] = torch.arange(count, device=device) + 2000 + 10 * b
    next_lens = torch.tensor(added, dtype=torch.int32, device=device)
    return tokens, start, end.int(), next_tokens, next_lens, out_start


def merge_by_hand(
    tokens: Tensor,
    start: Tensor,
    end: Tensor,
    next_tokens: Tensor,
    next_lens: Tensor,
    out_start: Tensor,
    fill: int,
) -> tuple[list[int], list[bool]]:
    merged: list[int] = []
    rejected: list[bool] = []
    for b in range(len(end)):
        row = tokens[start[b] : end[b]].tolist() + next_tokens[b, : next_lens[b]].tolist()
        spare = int(out_start[b + 1] - out_start[b]) - len(row)
        merged += row + [fill] * spare
        rejected += [False] * len(row) + [True] * spare
    return merged, rejected


@pytest.mark.parametrize("merge", [ops.merge_tokens.reference, merge_tokens_triton])
@pytest.mark.parametrize("fill", [0, 1, 5])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_rows_are_merged(rows, fill, merge, device):
    inputs = make_rows(rows, device)
    merged, rejected = merge(*inputs, int(inputs[-1][-1]), fill)
    assert merged.dtype == torch.int64 and rejected.dtype == torch.bool
    assert (merged.tolist(), rejected.tolist()) == merge_by_hand(*inputs, fill)


@pytest.mark.parametrize("merge", [ops.merge_tokens.reference, merge_tokens_triton])
def test_next_tokens_may_be_a_slice(merge, device):
    *inputs, next_tokens, next_lens, out_start = make_rows(ROWS["rejections"], device)
    wide = torch.cat([next_tokens, next_tokens * 0 - 9], dim=1)[:, : next_tokens.shape[1]]
    expected = merge_by_hand(*inputs, next_tokens, next_lens, out_start, 0)
    merged, rejected = merge(*inputs, wide, next_lens, out_start, int(out_start[-1]))
    assert (merged.tolist(), rejected.tolist()) == expected


@needs_cuda
def test_many_long_rows(device):
    rows = [(1500 + b, 1500 - 3 * b, 1, 1501 + b) for b in range(64)]
    inputs = make_rows(rows, device)
    total = int(inputs[-1][-1])
    for expected, actual in zip(
        ops.merge_tokens.reference(*inputs, total), merge_tokens_triton(*inputs, total), strict=True
    ):
        assert torch.equal(expected, actual)
