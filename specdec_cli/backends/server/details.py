"""The rounds of one request: from a server's details, or from the sizes of its chunks."""

from collections import Counter
from collections.abc import Sequence

from specdec_cli.backends.server.dialects import Details

INVALID = "spec_details_invalid"


def is_sound(found: Details, k: int, tokens_after_first: int, *, may_skip: bool) -> bool:
    """Whether details contradict neither themselves nor the text.

    tokens_after_first: of the first chunk, which is the prefill's. may_skip: whether rounds may
    propose nothing, so that a text may have more tokens than the counted rounds allow.
    """
    numbers = (found.num_rounds, found.num_accepted, *found.histogram)
    if any(type(one) is not int or one < 0 for one in numbers) or len(found.histogram) > k + 1:
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
    """The number that each round accepted, in order; None where the two sources do not fit.

    They are a histogram and the sizes of the chunks after the first. Every round but the last is a
    chunk of its accepted proposals and one token more. The last may have accepted tokens beyond the
    text's end, which no chunk has.
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
    """Whether chunks are rounds, by the counters of all requests.

    sizes: of each request's chunks after its first. drafts, accepted: as counted. The last round
    of a request may have accepted tokens beyond its text.
    """
    every = [size for own in sizes for size in own]
    seen = sum(size - 1 for size in every)
    beyond = sum(k for own in sizes if own)
    return (
        len(every) == drafts
        and all(1 <= size <= k + 1 for size in every)
        and seen <= accepted <= seen + beyond
    )
