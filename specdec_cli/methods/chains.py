"""Teacher forcing of a head that reads its own outputs, over a text that is already written.

A proposal of such a head depends on the proposals before it in its round. So a round is begun at
each token of the text, and its proposals are made along the text. The rounds of several tokens run
side by side, each in cache blocks of its own. Legend: N rounds, H width of the head, V vocabulary.
"""

from collections.abc import Sequence as Values

import torch

from specdec_cli.acceptance.base import NoForecast
from specdec_cli.core.batch import Span
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.sampling import by_target_ids
from specdec_cli.core.types import SamplingParams, Sequence
from specdec_cli.methods.teacher import Teacher, acceptance, logits_of
from specdec_cli.models.heads.paged import PagedHead

_SIDE_BY_SIDE = 64  # rounds; the distributions of one step of each are held

# Of each round: the chances of its proposals, and the sums of min(p, q) where they are made.
_Chain = tuple[list[float], list[float]]


@torch.inference_mode()
def forecast_chains(
    teacher: Teacher,
    head: PagedHead | None,
    max_len: int,
    prompt: Values[int],
    output: Values[int],
    k: int,
    params: SamplingParams,
) -> Forecast:
    """A head's chances of acceptance in a round of k that begins at each token of `output`.

    head: None on a rank that holds no part of it; all of the target's ranks join its passes.
    max_len: positions that the head may use. Valid on rank 0 only. Raises `NoForecast` if the cache
    has no room for a round beside the text.
    """
    tokens = [*prompt, *output]
    reach = min(len(tokens), max_len)
    text = Sequence(0, tokens[:reach], len(prompt), reach)
    allocator, target = teacher.allocator, teacher.target
    touched = max(k - 2, 0) // allocator.block_size + 2  # blocks with rows of one round, at most
    spare: list[int] = []
    found: list[_Chain] = []
    allocator.extend(text.block_table, reach)
    try:
        width = min(_SIDE_BY_SIDE, allocator.num_free // touched)
        if width == 0:
            raise NoForecast
        allocator.extend(spare, width * touched * allocator.block_size)
        hidden = _prefill(teacher, head, text)
        for begin in range(len(prompt), reach, width):
            starts = range(begin, min(begin + width, reach))
            scored = None
            if not params.is_greedy:
                scored = logits_of(target, text, begin - 1, min(starts.stop + k - 1, reach) - 1)
            if head is not None and teacher.parallel.is_first:
                first = hidden[begin - len(prompt) :][: len(starts)]
                copies = _side_by_side(head, text, starts, spare)
                found += _chains(head, copies, starts, first, scored, k, target.vocab_size, params)
    finally:
        allocator.shrink(spare, 0)
        allocator.shrink(text.block_table, 0)
    found += [([], [])] * (len(output) - len(found))
    return Forecast(
        ahead=tuple(tuple(chances) for chances, _ in found),
        overlap=tuple(common[0] if common else 0.0 for _, common in found),
    )


def _prefill(teacher: Teacher, head: PagedHead | None, text: Sequence) -> torch.Tensor:
    """[N, H], the output that each round begins with, that of the row before the text's last token.

    Empty on a rank without the head. The target's cache and the head's hold the text afterwards.
    """
    # A round after a single token has no row to begin with, and reads zeros.
    rows: list[torch.Tensor] = []
    for start in range(0, len(text.tokens) - 1, teacher.prefill_chunk):
        stop = min(start + teacher.prefill_chunk, len(text.tokens) - 1)
        features = teacher.target.forward([Span(text, start, stop)], [0]).hidden
        if head is not None:
            assert features is not None, "the target has to return hidden states"
            hidden = head.forward([Span(text, start, stop)], features)
            if text.num_prompt_tokens == 1 and start == 0:
                rows.append(torch.zeros_like(hidden[:1]))
            rows.append(hidden[max(0, text.num_prompt_tokens - 2 - start) :])
    return torch.cat(rows) if rows else torch.empty(0)


def _side_by_side(
    head: PagedHead, text: Sequence, starts: range, spare: list[int]
) -> list[Sequence]:
    """The text once for each round, with blocks of its own from the round's first row on.

    starts: the number of tokens that each round begins with.
    """
    size = head.cache.block_size
    touched = len(spare) // len(starts)
    copies = []
    for place, n in enumerate(starts):
        shared = (n - 1) // size
        own = spare[place * touched : (place + 1) * touched]
        copies.append(Sequence(0, text.tokens, n, n, [*text.block_table[:shared], *own]))
    # The first of these blocks begins with rows that come before the round.
    source = [text.block_table[(n - 1) // size] for n in starts]
    goal = [copy.block_table[(n - 1) // size] for copy, n in zip(copies, starts, strict=True)]
    for pool in (pool for pair in head.cache.layers for pool in pair):
        pool[goal] = pool[source]
    return copies


def _chains(
    head: PagedHead,
    copies: list[Sequence],
    starts: range,
    hidden: torch.Tensor,
    scored: torch.Tensor | None,
    k: int,
    vocab_size: int,
    params: SamplingParams,
) -> list[_Chain]:
    """The chances in the rounds that begin with `starts` tokens, as far as the text goes.

    hidden: [N, H], as from `_prefill`. scored: the target's logits of the token after the first
    round's text and of the following ones; None if decoding is greedy. vocab_size: V.
    """
    tokens = copies[0].tokens
    found: list[_Chain] = [([], []) for _ in starts]
    live = list(starts)  # an end of the text ends the last rounds first
    for place in range(k):
        x = head.head.normed(hidden[: len(live)])
        drafted = head.head.logits(x)
        if (ids := head.head.ids) is not None:
            drafted = by_target_ids(drafted, ids, vocab_size)
        chances, common = acceptance(
            drafted,
            None if scored is None else scored[place : place + len(live)],
            [tokens[n + place] for n in live],
            vocab_size,
            params,
        )
        for chain, chance, overlap in zip(found, chances, common, strict=False):
            chain[0].append(chance)
            chain[1].append(overlap)
        live = [n for n in live if n + place + 1 < len(tokens)]
        if not live or place + 1 == k:
            break
        rows = [Span(copy, n - 1 + place, n + place) for n, copy in zip(live, copies, strict=False)]
        hidden = head.forward(rows, head.head.fed_back(x)[: len(live)], fused=True)
    return found
