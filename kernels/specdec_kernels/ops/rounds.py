"""A round on the device: what a pass is fed, what was accepted, and what follows."""

from torch import Tensor

from specdec_kernels.advance import accept_reference, advance_reference
from specdec_kernels.clock import stamp_reference
from specdec_kernels.merge import merge_tokens_reference
from specdec_kernels.ngram import ngram_lookup_reference
from specdec_kernels.padding import padded_pass_reference


def merge_tokens(
    tokens: Tensor,
    start: Tensor,
    end: Tensor,
    next_tokens: Tensor,
    next_lens: Tensor,
    out_start: Tensor,
    total: int,
    fill: int = 0,
) -> tuple[Tensor, Tensor]:
    """Keep the valid tokens of every row, append the next ones, fill up to the row's capacity.

    Args:
        tokens: [N] int64, packed.
        start: [B + 1] int32, where each row begins in `tokens`.
        end: [B] int32, end (exclusive) of the row's valid tokens; the rest were rejected.
        next_tokens: [B, M] int64.
        next_lens: [B] int32, 0..M, how many of `next_tokens` to append.
        out_start: [B + 1] int32, where each row begins in the output.
        total: `out_start[B]`, known on the host.
        fill: A valid token id for the unused places: they pass through the embedding.

    Returns:
        merged [total] int64, and rejected [total] bool, True at the filled places.
    """
    args = (tokens, start, end, next_tokens, next_lens, out_start, total, fill)
    if tokens.is_cuda:
        from specdec_kernels.merge_triton import merge_tokens_triton

        return merge_tokens_triton(*args)
    return merge_tokens_reference(*args)


def padded_pass(
    tokens: Tensor,
    length: Tensor,
    lens: Tensor,
    active: Tensor,
    block_tables: Tensor,
    offset: int,
    margin: int,
    block_size: int,
    max_len: int,
    num_ids: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of a pass that feeds Q tokens of each of B sequences, from length + offset on.

    Token j of a sequence is live iff the sequence is active, its position is within the model,
    and lens >= offset + j + margin; the others are padding, whose keys go to the trash block.

    Args:
        tokens: [B, Q] int64; clamped into 0..num_ids - 1.
        length, lens: [B] int64.
        active: [B] bool.
        block_tables: [B, MB] int32.
        offset, margin: See above.
        block_size: Slots a block.
        max_len: Positions the model knows.
        num_ids: Size of its vocabulary.

    Returns:
        ids [B * Q] int64; positions [B * Q] int64, clamped into the model's; slots [B * Q] int64;
        context_lens [B] int32, the last token's position, unclamped, and one.
    """
    args = (tokens, length, lens, active, block_tables, offset, margin, block_size, max_len)
    if tokens.is_cuda:
        from specdec_kernels.padding_triton import padded_pass_triton

        return padded_pass_triton(*args, num_ids)
    return padded_pass_reference(*args, num_ids)


def accept(
    proposed: Tensor,
    best: Tensor,
    lens: Tensor,
    accept_noise: Tensor | None = None,
    rates: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Greedy verification: proposals stand while they are the target's own choice.

    The one-hot case of `rejection_sample`. With rates, a proposal stands iff its noise is below
    the rate of its place, whatever the target says.

    Args:
        proposed: [B, K] int64, -1 where the draft's logits were not finite.
        best: [B, K + 1] int64, the target's choice at each place, -1 where it has none.
        lens: [B] int64, proposals of each row.
        accept_noise: [B, K] fp32 in [0, 1).
        rates: [K] fp32.

    Returns:
        tokens [B, K + 1] int64, of which accepted + 1 count, and accepted [B] int64; -1 where
        `best` is -1 at a place up to `lens`, -2 where a proposal is.
    """
    if proposed.is_cuda:
        from specdec_kernels.advance_triton import accept_triton

        return accept_triton(proposed, best, lens, accept_noise, rates)
    return accept_reference(proposed, best, lens, accept_noise, rates)


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
    """Append what a round decided to every active sequence, in place, and record it.

    accepted + 1 tokens are appended, or those up to the first end-of-sequence token. A sequence
    that meets one, or reaches its limit, is active no more.

    Args:
        tokens: [B, K + 1] int64. accepted, lens: [B] int64.
        tail: [B, 2] int64, the last two tokens.
        length, limit: [B] int64, tokens a sequence has, and at which it ends.
        active: [B] bool.
        eos_ids: [E] int64, or empty.
        record: [B, K + 3] int64: tokens, accepted and lens of every row, active or not.
        history: [R, L] int32, for those who look tokens up; what is appended is written there too,
            from place `length` on.
        rows: [B] int64, each sequence's row of `history`, no two the same.
    """
    args = (tokens, accepted, lens, tail, length, limit, active, eos_ids, record, history, rows)
    if tokens.is_cuda:
        from specdec_kernels.advance_triton import advance_triton

        return advance_triton(*args)
    return advance_reference(*args)


def ngram_lookup(
    history: Tensor,
    rows: Tensor,
    length: Tensor,
    room: Tensor,
    longest: int,
    shortest: int,
    k: int,
) -> tuple[Tensor, Tensor]:
    """What followed the longest suffix of each text that occurs earlier in it, the first time.

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
    args = (history, rows, length, room, longest, shortest, k)
    if history.is_cuda:
        from specdec_kernels.ngram_triton import ngram_lookup_triton

        return ngram_lookup_triton(*args)
    return ngram_lookup_reference(*args)


def stamp(out: Tensor, place: int) -> None:
    """Write the time in nanoseconds into `out[place]`, int64, after the kernels before it.

    On CUDA it is the device's own clock, which graphs read anew in every replay; its ticks may be
    a microsecond apart. Only differences mean anything.
    """
    if out.is_cuda:
        from specdec_kernels.clock_triton import stamp_triton

        return stamp_triton(out, place)
    return stamp_reference(out, place)
