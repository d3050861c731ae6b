"""Converts a server's responses into answers. Requests overlap in time, so each is charged only a
share of the time. Rounds are reconstructed if the server reports enough about them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from specdec_cli.backends.base import Finished, Served
from specdec_cli.backends.server.client import Answer
from specdec_cli.backends.server.counters import OTHERS
from specdec_cli.backends.server.dialects import Details, ServerFacts, is_count
from specdec_cli.core.figures import Counted, EngineFacts

Source = Literal["per_request", "chunks", "counters"]
INVALID = "spec_details_invalid"


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of one request: listed one by one if their order is known, otherwise only counted.

    order: two lists with one entry per round, first the numbers of accepted tokens, then the
        numbers of proposed tokens; None if the order of the rounds is unknown.
    histogram: entry i is the number of rounds that accepted i tokens; None if unknown, or if
        `order` is known.
    """

    order: tuple[list[int], list[int]] | None = None
    histogram: list[int] | None = None

    @property
    def count(self) -> int:
        return len(self.order[0]) if self.order else sum(self.histogram or ())

    @property
    def num_tokens(self) -> int | None:
        """The number of tokens that these rounds decided; None if the rounds are unknown. The last
        round may have decided tokens past the end of the text."""
        if self.order is not None:
            return sum(self.order[0]) + self.count
        if self.histogram is not None:
            return sum((place + 1) * count for place, count in enumerate(self.histogram))
        return None

    def after(self, num_tokens: int) -> "Rounds":
        """Return the rounds without those that decided the first `num_tokens` tokens; rounds of
        unknown order stay."""
        if self.order is None:
            return self
        left, place = num_tokens, 0
        while left > 0 and place < self.count:
            left -= self.order[0][place] + 1
            place += 1
        return Rounds((self.order[0][place:], self.order[1][place:]))


def is_sound(found: Details, k: int, tokens_after_first: int, *, may_skip: bool) -> bool:
    """Return True if a server's report on rounds is consistent with itself and with the length of
    the text.

    tokens_after_first: the number of output tokens that do not come from prefill. Prefill writes
        the first chunk, and rounds write the others.
    may_skip: whether a round may propose nothing. The server does not count such rounds, so the
        text may then be longer than the counted rounds explain.
    """
    numbers = (found.num_rounds, found.num_accepted, *found.histogram, found.num_proposed or 0)
    if not all(is_count(one) for one in numbers) or len(found.histogram) > k + 1:
        return False
    accepted = sum(place * count for place, count in enumerate(found.histogram))
    if sum(found.histogram) != found.num_rounds or accepted != found.num_accepted:
        return False
    if found.num_proposed is not None and not accepted <= found.num_proposed <= (
        k * found.num_rounds
    ):
        return False
    if not may_skip and tokens_after_first > accepted + found.num_rounds:
        return False
    if found.accepted is None or found.proposed is None:
        return True
    pairs = list(zip(found.proposed, found.accepted, strict=False))
    counts = Counter({place: count for place, count in enumerate(found.histogram) if count})
    return (
        len(found.proposed) == len(found.accepted)
        and all(0 <= a <= p <= k for p, a in pairs)
        and Counter(found.accepted) == counts
        and found.num_proposed in (None, sum(found.proposed))
    )


def in_order(found: Details, sizes: Sequence[int]) -> list[int] | None:
    """Return how many proposals each round accepted, in order. If the server does not report this,
    it is derived from the sizes of the chunks. Returns None if these do not fit the server's
    histogram.

    sizes: the number of tokens in each chunk after the first. Each round sends one chunk: its
    accepted proposals and one more token. Only the last round may have accepted more tokens than it
    sends, because the text can end among them.
    """
    if found.accepted is not None:
        return list(found.accepted)
    if len(sizes) != found.num_rounds or not sizes:
        return None if sizes or found.num_rounds else []
    left = Counter({place: count for place, count in enumerate(found.histogram) if count})
    left.subtract(size - 1 for size in sizes[:-1])
    rest = [place for place, count in left.items() if count]
    if any(count < 0 for count in left.values()) or len(rest) != 1 or rest[0] < sizes[-1] - 1:
        return None
    return [*(size - 1 for size in sizes[:-1]), rest[0]]


def chunks_tell(sizes: Sequence[Sequence[int]], k: int, drafts: int, accepted: int) -> bool:
    """Return True if the server's counters show that each chunk was one round.

    sizes: for each request, the number of tokens in each chunk after its first.
    drafts, accepted: the server's counts of drafts and of accepted tokens over all requests.
        `accepted` may exceed the number in the chunks, because the last round of a request may
        accept tokens past the end of the text.
    """
    every = [size for own in sizes for size in own]
    seen = sum(size - 1 for size in every)
    beyond = sum(k for own in sizes if own)
    return (
        len(every) == drafts
        and all(1 <= size <= k + 1 for size in every)
        and seen <= accepted <= seen + beyond
    )


NO_ROUNDS = Rounds()


def rounds_by_details(answer: Answer, k: int, *, may_skip: bool) -> Rounds | str | None:
    """Return the rounds that the server reports for one request. Returns None if it reports none,
    and a warning code if its report is impossible."""
    after = answer.num_tokens - answer.tokens_in_first
    found = answer.reading.details
    if found is None:
        return None if after else Rounds(([], []))
    if not is_sound(found, k, after, may_skip=may_skip):
        return INVALID
    accepted = in_order(found, answer.sizes)
    if accepted is None:
        return Rounds(histogram=[*found.histogram, *[0] * (k + 1 - len(found.histogram))])
    proposed = list(found.proposed or [k] * len(accepted))
    return Rounds((accepted, proposed))


def all_rounds(
    answers: Sequence[Answer], counted: Counted | str | None, k: int, *, may_skip: bool
) -> tuple[Source | None, list[Rounds], Counted | None, set[str]]:
    """Choose the best source of acceptance data: the server's report on each request, or else the
    sizes of the chunks, or else only the server's counters.

    counted: the counts from the server's counters, or a warning code if they are unknown; None if
        the server has no counters.

    Returns:
        The source; None if there is none.
        The rounds of each answer.
        The total counts over all answers; None unless the source needs counters.
        Warning codes.
    """
    remarks: set[str] = set()
    others = {OTHERS} if counted == OTHERS else set()
    if k == 0:
        return None, [NO_ROUNDS] * len(answers), None, others
    told = [rounds_by_details(a, k, may_skip=may_skip) for a in answers]
    if any(one == INVALID for one in told):
        remarks.add(INVALID)
    by_request = [one for one in told if isinstance(one, Rounds)]
    if answers and len(by_request) == len(answers) and any(a.reading.details for a in answers):
        return "per_request", by_request, None, remarks | others
    unknown = [NO_ROUNDS] * len(answers)
    if counted is None or isinstance(counted, str):
        return None, unknown, None, remarks | ({counted} if counted else set())
    accepted = sum(counted.num_accepted_tokens_per_pos)
    sizes = [answer.sizes for answer in answers]
    if chunks_tell(sizes, k, counted.num_drafts, accepted):
        found = [Rounds(([size - 1 for size in own], [k] * len(own))) for own in sizes]
        return "chunks", found, counted, remarks
    return "counters", unknown, counted, remarks


def shares(spans: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    """Divide time among overlapping spans. Each instant is split equally among the spans that
    contain it.

    spans: maps each key to the start and end of a span, in seconds.

    Returns the share of each span in seconds, by key.
    """
    times = sorted({at for span in spans.values() for at in span})
    open_at = dict.fromkeys(times, 0)
    for begin, end in spans.values():
        open_at[begin] += 1
        open_at[end] -= 1
    charged, total, running = {}, 0.0, 0
    for at, following in pairwise([*times, times[-1] if times else 0.0]):
        charged[at] = total
        running += open_at[at]
        total += (following - at) / running if running else 0.0
    return {key: charged[end] - charged[begin] for key, (begin, end) in spans.items()}


def _timed(
    rounds: Rounds, k: int, tokens: int, in_first: int, *, may_skip: bool
) -> tuple[Rounds, int, float]:
    """Find the rounds that the measured time of one answer covers. It begins with the first chunk,
    which may hold tokens of rounds beside the prefill's token.

    tokens: the number of output tokens. in_first: the number of those in the first chunk.

    Returns:
        The rounds, without those in the first chunk if the order of the rounds is known.
        The number of rounds without proposals. Servers do not count such rounds, but each of them
        wrote one token.
        The number of rounds that the time covers.
    """
    after = tokens - in_first
    if k == 0:
        return rounds, after, after
    if (decided := rounds.num_tokens) is None:
        return rounds, 0, 0
    if rounds.order is not None and not may_skip:
        rounds = rounds.after(in_first - 1)
        return rounds, 0, rounds.count
    without = max(0, tokens - 1 - decided) if may_skip else 0
    # The places of the rounds are unknown, so they are taken to be spread evenly over the text.
    share = after / (tokens - 1) if tokens > 1 else 0.0
    return rounds, without, share * (without + rounds.count)


def finished(
    answer: Answer,
    facts: ServerFacts,
    k: int,
    source: Source | None,
    rounds: Rounds,
    times: tuple[float, float],
    most: int,
    *,
    may_skip: bool,
) -> Finished:
    """Convert the outcome of one request to a `Finished` answer.

    k: the run's proposal length. At k = 0, each token after the first chunk counts as one round.
    source: the source of the rounds, from `all_rounds`; None if the rounds are unknown.
    rounds: the request's rounds.
    times: the request's share of the decoding time, and its share of the whole time from sending to
        the last token, in seconds.
    most: the number of tokens at which the answer would have been cut off.
    may_skip: whether rounds may have proposed nothing.
    """
    reading, request = answer.reading, answer.request
    served = Served(
        EngineFacts(kind=facts.kind, version=facts.version, acceptance_source=source),
        num_retries=answer.num_retries,
        send_lag_ms=(answer.sent - answer.due) * 1e3 if answer.sent else None,
    )
    found = Finished(
        index=request.index,
        prompt_token_ids=list(request.token_ids),
        token_ids=[],
        finish_reason="error",
        max_output_tokens=most,
        error=answer.error,
        arrived_at=answer.due,
        served=served,
    )
    if answer.error is not None:
        return found
    assert reading.finish_reason is not None
    tokens, in_first = answer.num_tokens, answer.tokens_in_first
    began = answer.began
    first = answer.chunks[0][0] if answer.chunks else None
    last = answer.chunks[-1][0] if answer.chunks else None
    after, decode = tokens - in_first, times[0]
    rounds, without, num_rounds = _timed(rounds, k, tokens, in_first, may_skip=may_skip)
    span = last - first if first is not None and last is not None else 0.0
    remarks = []
    if reading.token_ids and reading.usage not in (None, len(reading.token_ids)):
        remarks.append("usage_differs")
    if reading.cached_tokens:
        remarks.append("prefix_cache_hits")
    if reading.finish_reason == "length" and tokens < most:
        remarks.append("max_tokens_cut")
    if tokens > most:
        remarks.append("max_tokens_exceeded")
    if len(answer.chunks) < 2 and tokens > k + 1:
        remarks.append("one_chunk")
    order = rounds.order or ([], [])
    return replace(
        found,
        token_ids=reading.token_ids,
        finish_reason=reading.finish_reason,
        accepted_per_round=order[0],
        proposed_per_round=order[1],
        rounds_without_proposal=in_first + without,
        num_tokens_from_prefill=in_first,
        admitted_at=began,
        first_token_at=first,
        finished_at=last,
        prefill_seconds=times[1] - decode,
        decode_seconds=decode,
        round_share=num_rounds * decode / span if span else 0.0,
        ttft_ms=None if first is None else (first - began) * 1e3,
        tpot_ms=span * 1e3 / after if after > 0 and span else None,
        served=replace(
            served,
            e2el_ms=None if last is None else (last - began) * 1e3,
            acceptance_histogram=rounds.histogram,
            num_tokens=None if reading.token_ids else reading.usage,
            text=None if reading.token_ids else reading.text,
            remarks=tuple(remarks),
        ),
    )
