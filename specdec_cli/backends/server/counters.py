"""Reads the counters that a server exposes at /metrics, and compares two readings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from specdec_cli.core.figures import Counted

_SPEC = "vllm:spec_decode_num_"
_PER_POSITION = f"{_SPEC}accepted_tokens_per_pos_total"
_GENERATED = "vllm:generation_tokens_total"
_HITS = "vllm:prefix_cache_hits_total"
_PREFIX = "vllm:"

RESET, OTHERS, LATE = "counters_reset", "other_traffic", "counters_late"
UNREAD = "counters_unread"
Series = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of /metrics: vLLM's counters, and the times at which they were created."""

    values: Mapping[Series, float]

    @classmethod
    def of(cls, text: str) -> "Scrape":
        """Parse the text of /metrics. Raises ValueError if it has another format."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[Series, float] = {}
        for family in text_string_to_metric_families(text):
            # The parser drops `_total` from a family's name, but not from its samples' names.
            for sample in family.samples:
                is_ours = sample.name.startswith(_PREFIX)
                is_counter = is_ours and sample.name.endswith(("_total", "_created"))
                if is_counter and math.isfinite(sample.value):
                    found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
        return cls(found)

    @classmethod
    def answered(cls, status: int, text: str) -> "Scrape | None":
        """Parse an answer with its HTTP status. Returns None if it holds no counters of vLLM."""
        try:
            found = cls.of(text) if status == 200 else None
        except ValueError:
            return None
        return found if found is not None and found.values else None

    def total(self, name: str) -> float | None:
        """Return a counter's sum over its labels, for example over engines; None if the counter is
        missing."""
        found = [value for (own, _), value in self.values.items() if own == name]
        return sum(found) if found else None

    @property
    def by_position(self) -> dict[int, float]:
        """The number of accepted tokens by position in the draft, from 0."""
        found: dict[int, float] = {}
        for (name, labels), value in self.values.items():
            text = dict(labels).get("position", "")
            if name == _PER_POSITION and text.isascii() and text.isdigit():
                place = int(text)
                found[place] = found.get(place, 0.0) + value
        return found

    @property
    def k(self) -> int | None:
        """The server's proposal length; None without counters. The server has a counter for each
        position from the start, so k is the number of these counters."""
        return len(self.by_position) if self.values else None

    @property
    def cache_hits(self) -> float:
        return self.total(_HITS) or 0.0


def has_reset(before: Scrape, after: Scrape) -> bool:
    """Return True if a counter fell, disappeared, or was recreated."""
    return any(
        (now := after.values.get(series)) is None
        or now < was
        or (series[0].endswith("_created") and now != was)
        for series, was in before.values.items()
    )


def difference(before: Scrape, after: Scrape, k: int, tokens: int, most_more: int) -> Counted | str:
    """Compute how much the counters grew during a run, from the readings before and after it.
    Returns a warning code instead if the counters were reset, if they also count other clients'
    requests, or if they lag behind the answers.

    k: the number of draft positions to count.
    tokens: the number of output tokens in the answers to our requests.
    most_more: the maximum number of tokens that the server may have generated for our requests in
        addition to `tokens`.
    """
    if has_reset(before, after):
        return RESET
    was, now = before.total(_GENERATED), after.total(_GENERATED)
    if was is not None and now is not None:
        if now - was > tokens + most_more:
            return OTHERS
        if now - was < tokens:
            return LATE
    ahead, behind = after.by_position, before.by_position
    drafts, proposed = (
        int((after.total(name) or 0) - (before.total(name) or 0))
        for name in (f"{_SPEC}drafts_total", f"{_SPEC}draft_tokens_total")
    )
    per_pos = [int(ahead.get(i, 0) - behind.get(i, 0)) for i in range(k)]
    return Counted(
        num_drafts=drafts, num_draft_tokens=proposed, num_accepted_tokens_per_pos=per_pos
    )
