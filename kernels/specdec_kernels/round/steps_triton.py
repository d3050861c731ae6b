"""The steps of a round as Triton kernels. The kernel that prepares a forward pass uses one lane per
token; those that accept, append or look up tokens use one program per sequence. A kernel also
writes the time stamps, because CUDA events captured in a graph cannot be read after each replay.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import launch_options

BLOCK = 128
PLACES = 2048  # text positions that a program searches at once


@triton.jit
def accept_kernel(
    proposed_ptr,  # [B, K] int64
    best_ptr,  # [B, K + 1] int64
    lens_ptr,  # [B] int64
    accept_noise_ptr,  # [B, K] fp32, or None
    rates_ptr,  # [K] fp32, or None
    tokens_ptr,  # [B, K + 1] int64, out
    accepted_ptr,  # [B] int64, out
    noise_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    length = tl.load(lens_ptr + row)
    best = tl.load(best_ptr + row * (K + 1) + place, mask=place <= K, other=0)
    proposed = tl.load(proposed_ptr + row * K + place, mask=place < K, other=0)
    drafted = (place < length) & (place < K)
    if rates_ptr is not None:
        noise = tl.load(accept_noise_ptr + row * noise_stride + place, mask=place < K, other=1.0)
        rate = tl.load(rates_ptr + place, mask=place < K, other=0.0)
        stands = drafted & (noise < rate)
    else:
        stands = drafted & (proposed == best)
    accepted = tl.min(tl.where(stands, BLOCK, place), axis=0)
    own = tl.sum(tl.where(place == accepted, best, 0), axis=0)
    tokens = tl.where(place < K, proposed, 0)
    tokens = tl.where(place == accepted, own, tokens)
    tl.store(tokens_ptr + row * (K + 1) + place, tokens, mask=place <= K)
    void = tl.max(((best < 0) & (place <= length) & (place <= K)).to(tl.int32), axis=0)
    spoilt = tl.max((drafted & (proposed < 0)).to(tl.int32), axis=0)
    told = tl.where(spoilt > 0, -2, tl.where(void > 0, -1, accepted))
    tl.store(accepted_ptr + row, told.to(tl.int64))


@triton.jit(do_not_specialize=["num_eos"])
def advance_kernel(
    tokens_ptr,  # [B, K + 1] int64
    accepted_ptr,  # [B] int64
    lens_ptr,  # [B] int64
    tail_ptr,  # [B, TAIL] int64, in and out
    length_ptr,  # [B] int64, in and out
    limit_ptr,  # [B] int64
    active_ptr,  # [B] bool, in and out
    eos_ids_ptr,  # [E] int64
    record_ptr,  # [B, K + 3] int64, out
    history_ptr,  # [R, L] int32, out, or None
    rows_ptr,  # [B] int64, or None
    num_eos,
    history_stride,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    here = place < WIDTH
    tokens = tl.load(tokens_ptr + row * WIDTH + place, mask=here, other=0)
    accepted = tl.load(accepted_ptr + row)
    record = record_ptr + row * (WIDTH + 2)
    tl.store(record + place, tokens, mask=here)
    tl.store(record + WIDTH, accepted)
    tl.store(record + WIDTH + 1, tl.load(lens_ptr + row))

    count = tl.maximum(accepted, 0) + 1
    first = tl.full([], WIDTH, tl.int32)
    for e in range(num_eos):
        is_eos = (tokens == tl.load(eos_ids_ptr + e)) & (place < count) & here
        first = tl.minimum(first, tl.min(tl.where(is_eos, place, WIDTH), axis=0))
    count = tl.minimum(count, first.to(tl.int64) + 1)

    # The tail holds the last TAIL tokens of the sequence. Drop `count` old tokens from its front,
    # and append the new ones. A failed round has token -1. Store the valid id 0 instead, because
    # the next round may read the tail before the host reads the record and sees the failure.
    at = tl.arange(0, TAIL_BLOCK) + count
    old = tl.load(tail_ptr + row * TAIL + at, mask=at < TAIL, other=0)
    is_new = (at >= TAIL) & (at < TAIL + count)
    new = tl.load(tokens_ptr + row * WIDTH + at - TAIL, mask=is_new, other=0)
    tl.debug_barrier()  # the old tail must be read before the new one is written
    active = tl.load(active_ptr + row) != 0
    before_round = tl.load(length_ptr + row)
    length = before_round + count
    stays = (first == WIDTH) & (length < tl.load(limit_ptr + row))
    if active:
        tail = tl.where(at < TAIL, old, tl.maximum(new, 0))
        tl.store(tail_ptr + row * TAIL + at - count, tail, mask=at < TAIL + count)
        tl.store(length_ptr + row, length)
        tl.store(active_ptr + row, stays)
        if history_ptr is not None:
            end_ptr = history_ptr + tl.load(rows_ptr + row) * history_stride + before_round
            tl.store(end_ptr + place, tl.maximum(tokens, 0).to(tl.int32), mask=place < count)


def accept_triton(
    proposed: Tensor,
    best: Tensor,
    lens: Tensor,
    accept_noise: Tensor | None = None,
    rates: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `ops.accept`."""
    rows, width = proposed.shape
    assert best.shape == (rows, width + 1) and lens.shape == (rows,)
    assert proposed.is_contiguous() and best.is_contiguous()
    assert (accept_noise is None) == (rates is None)
    tokens = torch.empty_like(best)
    accepted = torch.empty_like(lens)
    accept_kernel[(rows,)](
        *(proposed, best, lens, accept_noise, rates, tokens, accepted),
        0 if accept_noise is None else accept_noise.stride(0),
        K=width,
        BLOCK=triton.next_power_of_2(width + 1),
        num_warps=1,
        **launch_options(),
    )
    return tokens, accepted


def advance_triton(
    tokens: Tensor,
    accepted: Tensor,
    lens: Tensor,
    tail: Tensor,
    length: Tensor,
    limit: Tensor,
    active: Tensor,
    eos_ids: Tensor,
    record: Tensor,
    history: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    """See `ops.advance`."""
    batch, width = tokens.shape
    assert len(tail) == batch and record.shape == (batch, width + 2)
    assert accepted.shape == lens.shape == length.shape == limit.shape == active.shape == (batch,)
    assert all(t.is_contiguous() for t in (tokens, tail, record))
    assert (history is None) == (rows is None)
    assert history is None or history.stride(1) == 1
    advance_kernel[(batch,)](
        *(tokens, accepted, lens, tail, length, limit, active, eos_ids, record, history, rows),
        eos_ids.numel(),
        0 if history is None else history.stride(0),
        WIDTH=width,
        TAIL=tail.shape[1],
        BLOCK=triton.next_power_of_2(width),
        TAIL_BLOCK=triton.next_power_of_2(tail.shape[1]),
        num_warps=1,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["total", "offset", "columns", "table_stride", "max_len", "num_ids"])
def padded_pass_kernel(
    tokens_ptr,  # [B, Q] int64
    length_ptr,  # [B] int64
    lens_ptr,  # [B] int64, or None
    active_ptr,  # [B] bool
    block_tables_ptr,  # [B, MB] int32
    ids_ptr,  # [B * Q] int64, out
    positions_ptr,  # [B * Q] int64, out
    slots_ptr,  # [B * Q] int64, out
    context_lens_ptr,  # [B] int32, out
    total,
    offset,
    columns,
    token_stride_b,
    token_stride_q,
    table_stride,
    max_len,
    num_ids,
    WIDTH: tl.constexpr,
    MARGIN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = lane < total
    row = lane // WIDTH
    column = lane % WIDTH
    token = tl.load(tokens_ptr + row * token_stride_b + column * token_stride_q, mask=here, other=0)
    token = tl.minimum(tl.maximum(token, 0), num_ids - 1)

    place = offset + column
    at = tl.load(length_ptr + row, mask=here, other=0) + place
    active = tl.load(active_ptr + row, mask=here, other=0) != 0
    live = here & active & (at >= 0) & (at < max_len)
    if lens_ptr is not None:
        live &= tl.load(lens_ptr + row, mask=here, other=-1) >= place + MARGIN
    position = tl.minimum(tl.maximum(at, 0), max_len - 1)
    entry = tl.minimum(position // BLOCK_SIZE, columns - 1)
    block = tl.load(
        block_tables_ptr + row.to(tl.int64) * table_stride + entry, mask=live, other=0
    ).to(tl.int64)

    tl.store(ids_ptr + lane, token, mask=here)
    tl.store(positions_ptr + lane, position, mask=here)
    tl.store(slots_ptr + lane, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=here)
    tl.store(context_lens_ptr + row, (at + 1).to(tl.int32), mask=here & (column == WIDTH - 1))


def padded_pass_triton(
    tokens: Tensor,
    length: Tensor,
    lens: Tensor | None,
    active: Tensor,
    block_tables: Tensor,
    offset: int,
    margin: int,
    block_size: int,
    max_len: int,
    num_ids: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `ops.padded_pass`."""
    rows, width = tokens.shape
    assert length.shape == active.shape == (rows,) and (lens is None or lens.shape == (rows,))
    assert block_tables.shape[0] == rows and block_tables.stride(1) == 1
    total = rows * width
    out = torch.empty((3, total), dtype=torch.int64, device=tokens.device)
    context_lens = torch.empty(rows, dtype=torch.int32, device=tokens.device)
    padded_pass_kernel[(triton.cdiv(total, BLOCK),)](
        tokens,
        length,
        lens,
        active,
        block_tables,
        out[0],
        out[1],
        out[2],
        context_lens,
        total,
        offset,
        block_tables.shape[1],
        *tokens.stride(),
        block_tables.stride(0),
        max_len,
        num_ids,
        WIDTH=width,
        MARGIN=margin,
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        **launch_options(),
    )
    return out[0], out[1], out[2], context_lens


@triton.jit
def stamp_kernel(
    out_ptr,  # [N] int64
    PLACE: tl.constexpr,
):
    tl.store(out_ptr + PLACE, tl.extra.cuda.globaltimer())


def stamp_triton(out: Tensor, place: int) -> None:
    """See `ops.stamp`."""
    stamp_kernel[(1,)](out, PLACE=place, num_warps=1, **launch_options())


@triton.jit
def suffix_at(text_ptr, place, length, LONGEST: tl.constexpr):
    """Return how many of the tokens just before each index in `place` match the text's last
    tokens. Tokens are compared backwards, at most LONGEST of them."""
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

    # Rank the matches: a longer match has a higher rank; among matches of equal length, the first
    # has the highest. Each lane keeps the highest rank among its positions.
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
        BLOCK=PLACES,
        num_warps=8,
        **launch_options(),
    )
    return proposed, lens
