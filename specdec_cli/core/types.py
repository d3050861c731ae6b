"""Data types that the engine's modules share, on the host: token ids and settings, but no text."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from specdec_cli.core.detokenize import StopFinder

FinishReason = Literal["length", "eos", "stop", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings that all sequences of a run share: how tokens are sampled, and when a sequence ends.
    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off. `core.logits_processors` explains
    the last three."""

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

    index: its place among all prompts of the data set; with the seed, this is the key of its random
    numbers. stop_finder: makes a `StopFinder`; None without stop strings. Each run makes a new one,
    since it remembers the tokens that it has seen. arrives_at: seconds after the run's start,
    finite and not negative. The request is not admitted earlier.
    """

    index: int
    token_ids: tuple[int, ...]
    stop_finder: Callable[[], StopFinder] | None = None
    arrives_at: float = 0.0


class Arrivals(Protocol):
    """Requests that arrive during a run, in the order of their times. The next one may depend on
    the answers so far. is_over: whether the remaining requests need no answer."""

    def __iter__(self) -> Iterator[Request]: ...

    @property
    def is_over(self) -> bool: ...

    def answered(self, index: int) -> None:
        """Note that the request with this index has ended, possibly with an error."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """Permissions that only the command line may give. plugins: files to run in every process."""

    trust_remote_code: bool = False
    allow_pickle: bool = False
    plugins: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and the tokens written after it, which only grow.

    target_kv, draft_kv: numbers of leading tokens with valid keys and values in each cache. Both
    caches use one `block_table`. Rolling back rejected tokens moves only these two integers.
    """

    index: int  # global prompt index: with the seed, the key of every random number
    tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int  # the sequence ends when it holds this many tokens
    block_table: list[int] = field(default_factory=list)
    target_kv: int = 0
    draft_kv: int = 0
    proposed_per_round: list[int] = field(default_factory=list)  # rounds with k_i >= 1 only
    accepted_per_round: list[int] = field(default_factory=list)
    rounds_without_proposal: int = 0
    num_tokens_from_prefill: int = 0  # counted as rounds without proposals, though none was run
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    # A pass or a round is divided equally among its sequences. The next five fields sum this
    # sequence's shares: of times, of engine rounds, and of the distinct experts that were read.
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    round_share: float = 0.0
    stage_ms: dict[str, float] = field(default_factory=dict)
    experts_share: float | None = None
    arrived_at: float = 0.0  # seconds on the host's clock; not before the run's start
    queued_seconds: float = 0.0  # from its arrival to its first admission
    # Seconds that each model's passes took before the first token, also for other sequences.
    target_prefill_seconds: float = 0.0
    draft_prefill_seconds: float = 0.0
    admitted_at: float | None = None  # host clock, seconds
    first_token_at: float | None = None
    finished_at: float | None = None
    _packed: bytes = field(init=False, repr=False)  # int64, the tokens with which it began

    def __post_init__(self) -> None:
        self._packed = array("q", self.tokens).tobytes()

    def packed(self, start: int, stop: int) -> bytes:
        """Return the bytes of `tokens[start:stop]` as int64. The tokens that a sequence begins with
        are packed when it is created, since the device waits for its first pass."""
        if 8 * stop <= len(self._packed):
            return self._packed[8 * start : 8 * stop]
        return array("q", self.tokens[start:stop]).tobytes()

    @property
    def noise_key(self) -> int:
        """The lowest 32 bits of `index`, which are the key of the sequence's random numbers."""
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
        """The time from the request to the first token in milliseconds, by part; None before the
        first token. `queue` is not part of `ttft_ms`. `first_round` is all time outside prefill
        passes."""
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
        """Milliseconds per token after the first; None before the end, or with only one token."""
        if self.first_token_at is None or self.finished_at is None or self.num_new_tokens < 2:
            return None
        return (self.finished_at - self.first_token_at) * 1e3 / (self.num_new_tokens - 1)

    @property
    def distinct_experts(self) -> float | None:
        """The mean number of distinct experts that its rounds read in a layer; None if not
        counted."""
        if self.experts_share is None or not self.round_share:
            return None
        return self.experts_share / self.round_share

    def room(self, draft_max_len: int) -> int:
        """Return the largest number of tokens that may be proposed now. One token must be left for
        the target, and no proposal may lie past the draft's context length."""
        n = len(self.tokens)
        return max(0, min(self.max_tokens - n - 1, draft_max_len - n))


@dataclass(frozen=True, slots=True)
class Emission:
    """The tokens, possibly none, that a round or a prefill pass added. The first `num_accepted`
    were proposals."""

    seq: Sequence
    token_ids: list[int]
    num_accepted: int

    @property
    def index(self) -> int:
        return self.seq.index
