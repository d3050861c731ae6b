"""Data types on the host that the engine's modules share. They hold token ids, never text."""

import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from specdec_cli.core.detokenize import StopFinder
from specdec_cli.errors import UsageError

FinishReason = Literal["length", "eos", "stop", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings that all sequences of a run share: how tokens are sampled, and when a sequence ends.
    `temperature` 0 means greedy decoding; `top_k` 0 and `top_p` 1 turn these filters off. See
    `core.logits_processors` for the last three fields. Raises `UsageError` for an impossible
    value."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 256
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    seed: int = 0
    repetition_penalty: float = 1.0
    suppress_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        # A recipe has the same limits; these are for scripts. `max_new_tokens` is checked when an
        # engine starts: it may be 0 or less before, in estimates and if a prompt fills the context.
        allowed = {
            "temperature": (0.0 <= self.temperature < math.inf, "0 or a finite number above it"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "top_p": (0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            "min_new_tokens": (self.min_new_tokens >= 0, "0 or more"),
            "seed": (0 <= self.seed < 1 << 63, "0 to 2^63 - 1"),
            "repetition_penalty": (0.0 < self.repetition_penalty < math.inf, "above 0"),
        }
        for key, (fits, wanted) in allowed.items():
            if not fits:
                raise UsageError(f"{key} is {getattr(self, key)}, but it must be {wanted}")

    @property
    def changes_logits(self) -> bool:
        """True if logits are changed before tokens are drawn."""
        return self.processing != (1.0, (), 0)

    @property
    def processing(self) -> tuple[float, tuple[int, ...], int]:
        """The repetition penalty, the suppressed ids, and the minimum number of output tokens."""
        return self.repetition_penalty, self.suppress_tokens, self.min_new_tokens

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def filters(self) -> tuple[float, int, float]:
        """Temperature, top-k and top-p."""
        return self.temperature, self.top_k, self.top_p


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    index: the prompt's position in the data set. With the seed, it determines the random numbers
        that the request's tokens are drawn with.
    stop_finder: creates a `StopFinder`; None if there are no stop strings. Each run creates its own
        finder, since a finder remembers the tokens that it has been fed.
    arrives_at: the time from which the request may be admitted, in seconds after the run's start;
        finite and not negative.
    """

    index: int
    token_ids: tuple[int, ...]
    stop_finder: Callable[[], StopFinder] | None = None
    arrives_at: float = 0.0


class Arrivals(Protocol):
    """A source of requests that arrive during a run, in order of arrival. Which request comes next
    may depend on the requests that have been answered.

    is_over: True if the run may stop now, even if some requests have no answer yet.
    """

    def __iter__(self) -> Iterator[Request]: ...

    @property
    def is_over(self) -> bool: ...

    def answered(self, index: int, *, has_failed: bool = False) -> None:
        """Record that the request with this index has ended."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """Permissions that can be given only on the command line, not in a recipe. plugins: paths of
    Python files that every process runs."""

    trust_remote_code: bool = False
    allow_pickle: bool = False
    plugins: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and the tokens generated after it. Tokens are only ever appended.

    target_kv, draft_kv: how many of the first tokens have valid keys and values in the target's and
    in the draft's cache. Rolling back rejected tokens changes only these two integers.
    block_table: the sequence's cache blocks. The same table is used for both caches.
    """

    index: int  # as in `Request`
    tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int  # the sequence ends when it holds this many tokens
    block_table: list[int] = field(default_factory=list)
    target_kv: int = 0
    draft_kv: int = 0
    proposed_per_round: list[int] = field(default_factory=list)  # only rounds with proposals
    accepted_per_round: list[int] = field(default_factory=list)
    rounds_without_proposal: int = 0
    num_tokens_from_prefill: int = 0  # included in `rounds_without_proposal`
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    # A pass or a round over n sequences assigns 1/n of its cost to each of them. The next five
    # fields are sums of these shares, over all passes and rounds of this sequence.
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    round_share: float = 0.0
    stage_ms: dict[str, float] = field(default_factory=dict)
    experts_share: float | None = None
    arrived_at: float = 0.0  # seconds on the host's clock; not before the run started
    queued_seconds: float = 0.0  # from arrival to first admission
    # The total time of each model's prefill passes before this sequence's first token. Passes that
    # fed only other sequences are included, because this sequence had to wait for them.
    target_prefill_seconds: float = 0.0
    draft_prefill_seconds: float = 0.0
    admitted_at: float | None = None  # seconds on the host's clock
    first_token_at: float | None = None
    finished_at: float | None = None
    _packed: bytes = field(init=False, repr=False)  # the initial tokens as int64

    def __post_init__(self) -> None:
        self._packed = array("q", self.tokens).tobytes()

    def packed(self, start: int, stop: int) -> bytes:
        """Return `tokens[start:stop]` as the bytes of int64 values. The initial tokens were packed
        when the sequence was created, because packing them now would delay its first pass."""
        if 8 * stop <= len(self._packed):
            return self._packed[8 * start : 8 * stop]
        return array("q", self.tokens[start:stop]).tobytes()

    @property
    def noise_key(self) -> int:
        """The lowest 32 bits of `index`. Together with the run's seed, they determine the random
        numbers of the sequence."""
        return self.index & 0xFFFFFFFF

    @property
    def num_new_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def ttft_ms(self) -> float | None:
        """Milliseconds from admission to the first token; None before the first token."""
        if self.first_token_at is None or self.admitted_at is None:
            return None
        return (self.first_token_at - self.admitted_at) * 1e3

    @property
    def ttft_parts_ms(self) -> dict[str, float] | None:
        """The milliseconds from arrival to the first token, broken down by what they were spent on;
        None before the first token. All parts but `queue` add up to `ttft_ms`. `first_round` is the
        time after admission outside prefill passes."""
        if (ttft_ms := self.ttft_ms) is None:
            return None
        target, draft = self.target_prefill_seconds * 1e3, self.draft_prefill_seconds * 1e3
        return {
            "queue": self.queued_seconds * 1e3,
            "target_prefill": target,
            "draft_prefill": draft,
            "first_round": max(0.0, ttft_ms - target - draft),
        }

    @property
    def tpot_ms(self) -> float | None:
        """Mean milliseconds per token after the first; None if the sequence has not finished or has
        fewer than two output tokens."""
        if self.first_token_at is None or self.finished_at is None or self.num_new_tokens < 2:
            return None
        return (self.finished_at - self.first_token_at) * 1e3 / (self.num_new_tokens - 1)

    @property
    def distinct_experts(self) -> float | None:
        """The number of distinct experts whose weights a round reads in a layer, averaged over the
        sequence's rounds; None if experts are not counted."""
        if self.experts_share is None or not self.round_share:
            return None
        return self.experts_share / self.round_share

    def room(self, draft_max_len: int) -> int:
        """Return the maximum number of tokens that the next round may propose. With the token that
        the target adds after them, the sequence must not exceed `max_tokens`. The sequence and the
        proposals must also fit in the draft's context length."""
        n = len(self.tokens)
        return max(0, min(self.max_tokens - n - 1, draft_max_len - n))


def cached_positions(prompt: int, max_tokens: int, ahead: int, draft_max_len: int) -> int:
    """Return the maximum number of positions for which a sequence of at most `max_tokens` tokens,
    `prompt` of them in its prompt, ever needs cache blocks.

    This is one less than `max_tokens`, since the keys and values of the last token are never
    needed. It can be more if the proposer writes up to `ahead` positions past the text: the last
    round with proposals starts at `max_tokens - 2` tokens, and its writes may end `ahead` positions
    later, but not past the draft's context length. A single new token has no proposals.
    """
    length = max_tokens - 1
    has_proposals = ahead > 0 and prompt < length
    return max(length, min(length - 1 + ahead, draft_max_len)) if has_proposals else length


@dataclass(frozen=True, slots=True)
class Emission:
    """The tokens that a round or a prefill pass added to one sequence; there may be none. The first
    `num_accepted` of them were proposals, and the target chose the rest."""

    seq: Sequence
    token_ids: list[int]
    num_accepted: int

    @property
    def index(self) -> int:
        return self.seq.index
