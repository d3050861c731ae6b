"""Proposals looked up in a sequence's own tokens: Triton kernel, one program a sequence."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import launch_options

BLOCK = 2048  # places that a program compares at once


@triton.jit
def suffix_at(text_ptr, place, length, LONGEST: tl.constexpr):
    """Number of tokens before each `place` that equal the text's last ones, up to LONGEST."""
    count = tl.zeros_like(place)
    goes_on = place < length
    for back in tl.static_range(1, LONGEST + 1):
        own = tl.load(text_ptr + length - back, mask=length >= back, other=-1)
        goes_on &= place >= back
        token = tl.load(text_ptr + place - back, mask=goes_on, other=-2)
        goes_on &= token == own
        count += goes_on.to(tl.int32)
    return count


@triton.jit
def ngram_lookup_kernel(
    history_ptr,  # [R, L] int32
    rows_ptr,  # [B] int64
    length_ptr,  # [B] int64
    room_ptr,  # [B] int64
    proposed_ptr,  # [B, K] int64, out
    lens_ptr,  # [B] int64, out
    history_stride,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    text_ptr = history_ptr + tl.load(rows_ptr + b) * history_stride
    length = tl.load(length_ptr + b).to(tl.int32)
    room = tl.load(room_ptr + b).to(tl.int32)

    # The longest suffix wins, then its first place: the largest rank. Each lane keeps the best rank
    # of its own places.
    best = tl.zeros([BLOCK], tl.int64)
    for start in range(0, tl.where(room > 0, length, 0), BLOCK):
        place = start + tl.arange(0, BLOCK)
        count = suffix_at(text_ptr, place, length, LONGEST)
        rank = (count.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
        best = tl.maximum(best, tl.where(count >= SHORTEST, rank, 0))
    winner = tl.max(best, axis=0)
    follower = tl.where(winner > 0, 0x7FFFFFFF - (winner & 0x7FFFFFFF).to(tl.int32), length)
    found = tl.minimum(tl.minimum(length - follower, room), K)

    lane = tl.arange(0, BLOCK_K)
    token = tl.load(text_ptr + follower + lane, mask=lane < found, other=0)
    tl.store(proposed_ptr + b * K + lane, token.to(tl.int64), mask=lane < K)
    tl.store(lens_ptr + b, found.to(tl.int64))


def ngram_lookup_triton(
    history: Tensor,
    rows: Tensor,
    length: Tensor,
    room: Tensor,
    longest: int,
    shortest: int,
    k: int,
) -> tuple[Tensor, Tensor]:
    """See `ops.ngram_lookup`."""
    (batch,) = rows.shape
    assert length.shape == room.shape == (batch,) and history.stride(1) == 1
    assert all(t.is_contiguous() for t in (rows, length, room)) and k > 0
    proposed = torch.empty((batch, k), dtype=torch.int64, device=history.device)
    lens = torch.empty_like(length)
    ngram_lookup_kernel[(batch,)](
        *(history, rows, length, room, proposed, lens, history.stride(0)),
        K=k,
        BLOCK_K=triton.next_power_of_2(k),
        LONGEST=longest,
        SHORTEST=shortest,
        BLOCK=BLOCK,
        num_warps=8,
        **launch_options(),
    )
    return proposed, lens
