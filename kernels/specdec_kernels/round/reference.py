"""The steps of a speculative round that run on the device. They prepare the inputs of a forward
pass, look up proposals, accept greedily, update the state, and record times.

Legend for shapes:
B: the number of sequences.
R: the number of rows of the token history, of L tokens each.
K: the maximum number of proposals per sequence.
Q: the number of tokens per sequence that a forward pass processes.
MB: the number of block-table columns.

Block 0 is the trash block: padding tokens write their keys and values to it.
"""

import time

import torch
from torch import Tensor

from specdec_kernels.dispatch import kernel


@kernel("specdec_kernels.round.steps_triton:padded_pass_triton")
def padded_pass(
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
    """Prepare the inputs of a forward pass that processes Q tokens per sequence. Token j of a
    sequence has the position length + offset + j.

    A token is real iff the sequence is active, the position lies in 0..max_len - 1, and, if lens
    are given, lens >= offset + j + margin. All other tokens are padding, and their keys and values
    go to the trash block.

    tokens: [B, Q] int64; clamped to 0..num_ids - 1.
    length: [B] int64, the sequences' lengths.
    lens: [B] int64, the number of proposals for each sequence, or None.
    active: [B] bool.
    block_tables: [B, MB] int32.
    block_size: tokens per block.
    max_len: the number of positions that the model supports.

    Returns:
        Ids [B * Q] int64.
        Positions [B * Q] int64, clamped to 0..max_len - 1.
        Cache slots [B * Q] int64.
        context_lens [B] int32: one more than the last token's unclamped position.
    """
    place = offset + torch.arange(tokens.shape[1], device=tokens.device)
    at = length[:, None] + place
    live = (at >= 0) & (at < max_len) & active[:, None]
    if lens is not None:
        live &= lens[:, None] >= place + margin
    position = at.clamp(0, max_len - 1)
    column = (position // block_size).clamp(max=block_tables.shape[1] - 1)
    block = block_tables.gather(1, column).long() * live
    slots = block * block_size + position % block_size
    context = (at[:, -1] + 1).to(torch.int32)
    ids = tokens.clamp(0, num_ids - 1)
    return ids.reshape(-1), position.view(-1), slots.view(-1), context


@kernel("specdec_kernels.round.steps_triton:accept_triton")
def accept(
    proposed: Tensor,
    best: Tensor,
    lens: Tensor,
    accept_noise: Tensor | None = None,
    rates: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Verify greedily: accept all proposals before the first one that differs from the target's
    choice.

    The result is that of `reject_logits` with one-hot distributions. If rates are given, they are
    used instead of the comparison: a proposal passes iff its `accept_noise` is below the rate for
    its index, whatever the target chose. All proposals before the first that fails are accepted.

    proposed: [B, K] int64, -1 where the draft's logits were not finite.
    best: [B, K + 1] int64, the target's choices, -1 where its logits were not finite.
    lens: [B] int64, the number of proposals in each row.
    accept_noise: [B, K] fp32 in [0, 1), or None.
    rates: [K] fp32, the acceptance rate for each index, or None.

    Returns:
        Tokens [B, K + 1] int64, of which the first accepted + 1 are valid.
        accepted [B] int64: the number of accepted proposals; -2 if a proposal is -1; -1 if a choice
        up to index `lens` is -1.
    """
    if rates is None or accept_noise is None:
        stands = proposed == best[:, : proposed.shape[1]]
    else:
        stands = accept_noise < rates
    # A loop over tokens is faster than tensor operations if there are only a few sequences.
    tokens, accepted = [], []
    rows = zip(*(t.tolist() for t in (proposed, best, lens, stands)), strict=True)
    for drafted, own, length, stood in rows:
        count = 0
        while count < length and stood[count]:
            count += 1
        tokens.append([*drafted[:count], own[count], *drafted[count + 1 :], 0][: len(own)])
        if min(drafted[:length], default=0) < 0:
            count = -2
        elif min(own[: length + 1]) < 0:
            count = -1
        accepted.append(count)
    return proposed.new_tensor(tokens).view(best.shape), proposed.new_tensor(accepted)


@kernel("specdec_kernels.round.steps_triton:advance_triton")
def advance(
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
    """Append a round's tokens to every active sequence, in place, and record the round.

    accepted + 1 tokens are appended, but none after the first end-of-sequence token. A sequence
    that gets such a token, or reaches its limit, becomes inactive. The torch implementation takes
    only host tensors.

    tokens: [B, K + 1] int64.
    accepted, lens: [B] int64.
    tail: [B, W] int64, the last W tokens of each sequence.
    length: [B] int64, the number of tokens of each sequence.
    limit: [B] int64, the number of tokens at which each sequence ends.
    active: [B] bool.
    eos_ids: [E] int64, may be empty.
    record: [B, K + 3] int64, receives each row's tokens, accepted and lens.
    history: [R, L] int32 or None; also receives the appended tokens, from index `length` on.
    rows: [B] int64 or None, the row of each sequence in `history`; all are different.
    """
    # A loop is faster than a dozen tensor operations if there are only a few sequences.
    ends = set(eos_ids.tolist())
    told = zip(
        *(x.tolist() for x in (tokens, accepted, lens, length, limit, active, tail)), strict=True
    )
    noted, lengths, still, tails = [], [], [], []
    for b, (decided, count, proposed, at, most, is_active, last) in enumerate(told):
        noted.append([*decided, count, proposed])
        new = [max(0, token) for token in decided[: max(0, count) + 1]] if is_active else []
        end = next((i for i, token in enumerate(decided[: len(new)]) if token in ends), None)
        new = new if end is None else new[: end + 1]
        if new and history is not None and rows is not None:
            history[rows[b], at : at + len(new)] = history.new_tensor(new)
        lengths.append(at + len(new))
        still.append(is_active and end is None and lengths[-1] < most)
        tails.append([*last, *new][-len(last) :])
    for held, values in ((record, noted), (length, lengths), (active, still), (tail, tails)):
        held.numpy()[...] = values  # copying with torch takes three times as long


@kernel("specdec_kernels.round.steps_triton:stamp_triton")
def stamp(out: Tensor, place: int) -> None:
    """Write the current time in nanoseconds to `out[place]`, int64, once all earlier kernels have
    ended.

    On CUDA, the time is that of the device's clock, which may advance only once per microsecond.
    Only differences between times are meaningful.
    """
    out.numpy()[place] = time.perf_counter_ns()


@kernel("specdec_kernels.round.steps_triton:ngram_lookup_triton")
def ngram_lookup(
    history: Tensor,
    rows: Tensor,
    length: Tensor,
    room: Tensor,
    longest: int,
    shortest: int,
    k: int,
) -> tuple[Tensor, Tensor]:
    """Propose the tokens that follow the first earlier occurrence of a text's longest suffix.

    Suffixes of `longest` down to `shortest` tokens are tried until one occurs earlier in the text
    (Saxena, "Prompt Lookup Decoding", 2023).

    history: [R, L] int32, token ids; each row is contiguous.
    rows: [B] int64, the row of each text.
    length: [B] int64, the number of tokens of each text.
    room: [B] int64, the maximum number of tokens to propose, 0..k.

    Returns:
        Proposals [B, k] int64, padded with 0.
        lens [B] int64: the number of proposals.
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
    """Find the first earlier occurrence of the text's longest suffix, and return the index of the
    token after it. Return the text's length if no suffix occurs earlier."""
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
