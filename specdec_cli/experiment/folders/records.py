"""The records that runs write, one JSON object per line.

Measuring, resuming, merging, reports and the JSON documents all use these classes. Does not import
torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from specdec_cli.core.figures import (
    Count,
    Counted,
    EngineFacts,
    Figure,
    Interval,
    Metrics,
    Name,
    Rate,
    Record,
    Slots,
    Spread,
    StageTimes,
    Whole,
    impossible,
)

_LONGEST = 1e12  # the upper limit of `Time`; about 30 years if in milliseconds
# A time in milliseconds or seconds. Fields that count rounds or experts use this type too.
Time = Annotated[float, Field(ge=0, lt=_LONGEST)]


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """A pair of tensor-parallel degrees: the number of ranks that hold the target, and how many of
    those ranks also hold the draft."""

    target_tp: int
    draft_tp: int

    @property
    def divides(self) -> bool:
        """True if the draft's degree divides the target's."""
        return self.target_tp % self.draft_tp == 0

    @classmethod
    def of(cls, found: "Key | Point | Sample | PairFacts") -> "Pair":
        """Return the pair of degrees in a record. A degree that the record lacks becomes 0, such as
        the draft TP at k = 0."""
        return cls(found.target_tp or 0, found.draft_tp or 0)

    def __str__(self) -> str:
        return f"target TP {self.target_tp}, draft TP {self.draft_tp}"


@dataclass(frozen=True, slots=True)
class Key:
    """Identifies the point that a record belongs to.

    draft: None at k = 0, whichever draft was loaded when the point was measured.
    batch_size: the maximum number of concurrent requests; 0 for no limit.
    target_tp, draft_tp: the degrees of a pair, in comparisons only. Points at k = 0 have no draft
        TP.
    request_rate: the rate at which requests arrive; None if requests have no arrival times, so that
        all requests of a batch are queued from the start.
    """

    draft: str | None
    batch_size: int
    k: int
    target_tp: int | None = None
    draft_tp: int | None = None
    request_rate: Rate | None = None

    def __post_init__(self) -> None:
        if self.k == 0:
            object.__setattr__(self, "draft", None)

    @classmethod
    def of(cls, record: "Sample | Point | CurvePart | Stretch") -> "Key":
        others = (getattr(record, n, None) for n in ("target_tp", "draft_tp", "request_rate"))
        return cls(record.draft, record.batch_size, record.k, *others)

    @property
    def plain(self) -> "Key":
        """The key of the point at k = 0 with which a point of a sweep is compared."""
        return Key(None, self.batch_size, 0, request_rate=self.request_rate)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by which a record identifies its point. Fields that only some points
        have (degrees, request rate) are left out if they are None."""
        point = {"draft": self.draft, "batch_size": self.batch_size, "k": self.k}
        others = {n: getattr(self, n) for n in ("target_tp", "draft_tp", "request_rate")}
        return point | given(**others)


class Sample(Record):
    """The result of one prompt at one point, a line of samples.jsonl. The output format requires
    the fields up to `seconds`. The other fields are stored because metrics are computed from them.

    Each list of times has one value per repeat. A round serves a whole batch, so each sample
    records its share of a round: `decode_seconds`, `round_share` and `stage_ms`, summed over all
    prompts, give the seconds, rounds and stage times of the engine.

    target_tp, draft_tp: the degrees of a pair, in comparisons only.
    num_tokens_from_prefill: as in `Metrics`. These tokens are included in
        `rounds_without_proposal`, but not in the shares of rounds and their times.
    distinct_experts: as in `Metrics`, over the rounds of this prompt; one value per repeat. None if
        experts are not counted.
    ttft_parts_ms: the parts of the time to the first token, by name, each with one value per
        repeat; see `core.types.Sequence`. None if they are not known.
    error: the reason why a prompt could not run, if `finish_reason` is "error".

    Only samples from servers have these fields:
    engine: facts about the server.
    acceptance_histogram: how many rounds accepted 0, 1, 2, ... proposals, if the order of the
        rounds is unknown.
    counted: how much the server's counters grew for all requests that ran together. Only one of
        these requests has it.
    num_tokens, text: the number of output tokens and their text, if the server sent no token ids.
    remarks: codes of warnings.

    If requests arrive at a rate, each request has its own sample, and each list has one value:
    request: the number of the request, from 0.
    due: when the request was due, in seconds after the first request was due.
    send_lag_ms: the delay between `due` and the sending of the request to a server.
    """

    target_tp: Count | None = None
    draft_tp: Count | None = None
    draft: Name | None
    k: Count
    batch_size: Slots
    request_rate: Rate | None = None
    request: Count | None = None
    index: Count
    category: Name | None
    prompt_token_ids: list[Count]
    token_ids: list[Count]
    finish_reason: Literal["length", "eos", "stop", "error"]
    accepted_per_round: list[Count]
    seconds: list[Time]
    proposed_per_round: list[Count]
    rounds_without_proposal: Count
    num_preemptions: Count
    max_output_tokens: Whole = 0  # below 0 for a prompt that is too long
    decode_seconds: list[Time]
    round_share: list[Time]
    stage_ms: dict[str, list[Time]]
    ttft_ms: list[Time]
    tpot_ms: list[Time]
    num_tokens_from_prefill: Count = 0
    distinct_experts: list[Time] | None = None
    ttft_parts_ms: dict[str, list[Time]] | None = None
    error: Name | None = None
    peak_memory_bytes: Count
    engine: EngineFacts | None = None
    num_retries: Count = 0
    e2el_ms: list[Time] = Field(default_factory=list)
    acceptance_histogram: list[Count] | None = None
    counted: Counted | None = None
    num_tokens: Count | None = None
    text: Name | None = None
    remarks: list[Name] = Field(default_factory=list)
    due: Time | None = None
    send_lag_ms: Figure = None

    @property
    def place(self) -> int:
        """The sample's index within its point: the request's number or, without one, the prompt's
        index."""
        return self.index if self.request is None else self.request

    @property
    def could_run(self) -> bool:
        return self.finish_reason != "error"

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) or self.num_tokens or 0

    @property
    def decoded_tokens(self) -> int:
        """The number of output tokens from rounds, generated in `decode_seconds`."""
        return self.num_output_tokens - self.num_tokens_from_prefill

    @property
    def num_drafts(self) -> int:
        """The number of rounds with proposals; 0 if it is unknown."""
        return len(self.accepted_per_round) or sum(self.acceptance_histogram or ())

    @property
    def num_accepted(self) -> int:
        """The number of accepted proposals in rounds with proposals."""
        if self.accepted_per_round:
            return sum(self.accepted_per_round)
        return sum(place * count for place, count in enumerate(self.acceptance_histogram or ()))

    @property
    def num_rounds(self) -> int:
        """The number of rounds that `decode_seconds` covers, with and without proposals."""
        without = self.rounds_without_proposal - self.num_tokens_from_prefill
        return self.num_drafts + without

    @property
    def usual_seconds(self) -> float:
        """The prompt's share of the round time, averaged over repeats that are not outliers."""
        return self.usual_mean(self.decode_seconds)

    def usual_mean(self, values: Sequence[float]) -> float:
        """Average `values`, one per repeat, over the repeats whose decoding time is not an outlier.
        If there are more or fewer values than repeats, average them all. Return 0 if there are no
        values."""
        if len(values) == len(self.decode_seconds):
            values = [values[place] for place in usual_repeats(self.decode_seconds)]
        return sum(values) / len(values) if values else 0.0

    @model_validator(mode="after")
    def _rounds_are_possible(self) -> Self:
        proposed, accepted = self.proposed_per_round, self.accepted_per_round
        if len(proposed) != len(accepted):
            raise impossible("accepted_per_round and proposed_per_round differ in length")
        if any(a > p or p > self.k for p, a in zip(proposed, accepted, strict=True)):
            raise impossible("a round accepted more than it proposed, or proposed more than k")
        if self.num_tokens_from_prefill > self.rounds_without_proposal:
            raise impossible("num_tokens_from_prefill exceeds rounds_without_proposal")
        if len(self.acceptance_histogram or ()) > self.k + 1:
            raise impossible("its acceptance_histogram has more than k + 1 entries")
        if self.counted and len(self.counted.num_accepted_tokens_per_pos) != self.k:
            raise impossible("its counters do not have one value for each of k positions")
        return self


FEWEST = 3  # minimum prompts for an interval; with two it would span several orders of magnitude
OUTLYING = 1.5  # a repeat is an outlier if it takes over this many times as long as the fastest


def usual_repeats(seconds: Sequence[float]) -> list[int]:
    """Return the indices of the repeats that did not take far longer than the fastest.

    All repeats do the same work, and disturbances only make them slower. The fastest repeat is
    therefore a sound reference, even if most repeats were disturbed.
    """
    fastest = min(seconds, default=0.0)
    return [place for place, value in enumerate(seconds) if value <= OUTLYING * fastest]


class CategoryMetrics(Record):
    """Figures of a point over the prompts of one category. They have the same names and meanings as
    in `Point` and its `metrics`."""

    num_prompts: Count
    num_output_tokens: Count
    mean_acceptance_length: Figure
    draft_acceptance_rate: Figure
    acceptance_rate_per_pos: list[float] | None
    decode_tokens_per_second: Figure
    speedup: Figure
    speedup_ci: Interval
    mean_acceptance_length_ci: Interval = None
    impossible_speedup: Figure = None

    @property
    def is_ok(self) -> bool:
        return True

    def number(self, name: str, _: str | None = None) -> float | None:
        """Return the figure with this name; None if there is none. The second argument exists only
        so that callers can treat this like `Point.number`."""
        value: float | None = getattr(self, name, None)
        return value


class BreakEven(Record):
    """The acceptance at which a point is as fast as plain decoding, given how long its rounds take.

    tokens_per_round: how many tokens a round must add per sequence to break even. This equals how
        long a round takes per sequence, relative to a round at k = 0, which adds one token. All
        rounds count, with and without proposals, as in `Metrics.tokens_per_round`.
    draft_acceptance_rate: the ratio of accepted to proposed tokens that yields this many tokens; 0
        if rounds take no longer than at k = 0, None if accepting all proposals would not be enough.
    alpha: the same for the geometric model (`forecasts.iid_length`), in which each proposal is
        accepted with this probability if all proposals before it are. 0 and None have the same
        meaning.
    is_predicted: whether the times come from the time curve.
    """

    tokens_per_round: Figure
    tokens_per_round_ci: Interval
    draft_acceptance_rate: Figure
    alpha: Figure
    is_predicted: bool = False


class Prediction(Record):
    """Figures predicted for a point from the run at the largest k. Errors are relative to the
    measured figures, and None if the point was not measured.

    is_exact: whether replaying the texts of that run gives exactly the rounds at this k.
    iid_alpha: the measured acceptance rate among proposals whose predecessors in the round were
        accepted.
    iid_mean_acceptance_length, iid_error: the mean acceptance length that `iid_alpha` yields if
        acceptance does not depend on the position, and its error.
    analytic_alpha: the mean acceptance probability, computed from the draft's and the target's
        distributions; None if these were not recorded.
    speedup_ci: the 95 % interval of the speed-up.
    speedup_error_ci: the 95 % interval of the speed-up's error, over the measured prompts.
    drafts_of_k: the k at which the replayed proposals were made, if proposals depend on k and were
        made at a different k; otherwise None.
    """

    method: Name
    is_exact: bool
    speedup: Figure
    speedup_error: Figure
    mean_acceptance_length: float
    mean_acceptance_length_error: Figure
    iid_alpha: float
    iid_mean_acceptance_length: float
    iid_error: Figure
    analytic_alpha: Figure
    speedup_ci: Interval = None
    speedup_error_ci: Interval = None
    drafts_of_k: int | None = None


class Stretch(Record):
    """The time window in which a point was measured under a request rate; a line of load.jsonl. It
    is written after the point's samples, so the samples are complete once it exists.

    window_seconds: the time between the first and the last due time of the measured requests, plus
        the mean time between requests. If all requests arrive at once, this is the time until the
        last answer.
    num_requests: the number of measured requests.
    num_answered: the number of answers in the window, including those to requests that are not
        measured.
    num_unmeasured: the number of requests that were due but are not measured.
    max_in_flight: the largest number of requests that were due but not answered at one time.
    crowding: how many requests are needed to compute an interval, divided by how many were
        measured; see `experiment.load.measuring.crowding`. If it is above 1, the window is too
        short.
    shard: the number of the shard, in merged folders.
    """

    draft: Name | None
    batch_size: Slots
    k: Count
    request_rate: Rate
    window_seconds: Time
    num_requests: Count
    num_answered: Count
    num_unmeasured: Count
    max_in_flight: Count
    overloaded: bool
    crowding: Time = 0.0
    shard: Count = 0


class Load(Record):
    """Figures of a point that only exist if requests arrive at a rate; see docs/load.md.

    offered_rate, goodput: None if all requests arrive at once.
    slo: the latency objectives in milliseconds, by the name of the latency.
    crowding: the largest of the point's windows; see `Stretch`.
    """

    arrivals: Name
    seed: Count
    offered_rate: Figure
    achieved_rate: Figure
    window_seconds: float
    num_requests: Count
    num_failed: Count
    num_unmeasured: Count
    max_in_flight: Count
    send_lag_ms: Spread
    overloaded: bool
    slo: dict[Name, float]
    slo_attainment: Figure
    slo_attainment_ci: Interval
    goodput: Figure
    goodput_ci: Interval
    crowding: Time = 0.0


def rate_name(rate: Rate) -> str:
    return f"{float(rate):g}"


def rate_in_words(rate: Rate) -> str:
    return "all requests at once" if rate == "inf" else f"{rate_name(rate)} requests/s"


def at_rate(rate: Rate) -> str:
    return f"{'with' if rate == 'inf' else 'at'} {rate_in_words(rate)}"


class Point(Record):
    """A line of points.jsonl, and an entry of a document's `points`.

    Points of sweeps have `draft` and predictions, but no degrees. Points of comparisons have
    degrees (`draft_tp` is None at k = 0) and the fields from `broadcast_ms` to `tokens_sha256`.

    request_rate, load: set only if requests arrive at a rate.
    *_ci: the 95 % intervals of the figures of the same name, in this record or in `metrics`.
    break_even: the acceptance needed to be as fast as plain decoding; None at k = 0.
    impossible_speedup: a measured speed ratio that is larger than speculation can reach, which
        shows that something disturbed the run; then `speedup` is None.
    engine, num_retries: set only for servers.
    """

    target_tp: Count | None = None
    draft_tp: Count | None = None
    k: Count
    batch_size: Slots
    request_rate: Rate | None = None
    draft: Name | None = None
    status: Literal["ok", "failed", "oom", "skipped"]
    metrics: Metrics | None = None
    speedup: Figure = None
    speedup_ci: Interval = None
    predicted_speedup: Figure = None
    mean_acceptance_length_ci: Interval = None
    per_category: dict[Name, CategoryMetrics] = Field(default_factory=dict)
    reason: Name | None = None
    prediction: Prediction | None = None
    broadcast_ms: Figure = None
    num_blocks: Count | None = None
    blocks_per_rank: list[Count] | None = None
    speedup_vs_equal_tp: Figure = None
    speedup_vs_equal_tp_ci: Interval = None
    tokens_sha256: Name | None = None
    break_even: BreakEven | None = None
    tokens_per_round_ci: Interval = None
    decode_tokens_per_second_ci: Interval = None
    round_ms_ci: Interval = None
    verify_ms_ci: Interval = None
    acceptance_rate_per_pos_ci: list[Interval] = Field(default_factory=list)
    conditional_acceptance_rate_per_pos_ci: list[Interval] = Field(default_factory=list)
    impossible_speedup: Figure = None
    engine: EngineFacts | None = None
    num_retries: Count = 0
    load: Load | None = None

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    @property
    def level(self) -> tuple[float, int]:
        """The request rate (0 without one) and batch size, for sorting. Only points with the same
        level are compared with each other."""
        return float(self.request_rate or 0.0), self.batch_size

    @property
    def level_in_words(self) -> str:
        if self.request_rate is None:
            return f"batch size {self.batch_size}"
        return rate_in_words(self.request_rate)

    @property
    def at_level(self) -> str:
        if self.request_rate is None:
            return f"at {self.level_in_words}"
        return at_rate(self.request_rate)

    @property
    def is_baseline(self) -> bool:
        """True if this is plain decoding."""
        return self.k == 0

    @property
    def is_predicted(self) -> bool:
        """True if the run was told to predict this point instead of measuring it."""
        return self.status == "skipped" and self.predicted_speedup is not None

    @property
    def speed(self) -> float:
        """The decoding speed in tokens/s; 0 if it is unknown."""
        return self.number("decode_tokens_per_second") or 0.0

    def number(self, name: str, part: str | None = None) -> float | None:
        """Return a figure of the point or, if that field is not set, of its metrics. Return None if
        the figure was not measured.

        part: for a figure with percentiles, the part to return, such as p50.
        """
        of = self if name in self.model_fields_set else self.metrics
        if self.engine is not None and of is not None and name not in of.model_fields_set:
            return None  # missing figures of a server's point are unknown, so no defaults apply
        found = getattr(of, name, None)
        value: float | None = found if part is None else getattr(found, part, None)
        return value

    @model_validator(mode="after")
    def _failures_have_reasons(self) -> Self:
        if self.status != "ok" and self.reason is None:
            raise impossible("it has no reason")
        return self


class _PartCounts(Record):
    draft: Name | None
    batch_size: Count
    k: Count
    part: Count
    sequence_rounds: Count
    rounds: Count
    decode_seconds: float


class CurvePart(StageTimes, _PartCounts):
    """A line of curve.jsonl. The time curve gives the cost of a round at each k; it is measured in
    parts that are spread over the sweep. A line holds one part at one k.

    Times and distinct_experts are sums over the part's rounds.

    shard: the number of the shard that measured the part, in merged folders.
    """

    distinct_experts: Figure = None
    shard: Count | None = None


class PairFacts(Record):
    """A line of pairs.jsonl. It is written when the models of a pair have been loaded, and again
    after each batch size at which there were new warnings.

    num_blocks: the number of KV blocks allocated on every rank.
    blocks_per_rank: how many blocks would have fit on each rank.
    warnings: all warnings about the machine so far, from measuring this pair.
    """

    target_tp: Count
    draft_tp: Count
    num_blocks: Count
    blocks_per_rank: list[Count]
    load_seconds: Time | None = None
    execution: dict[str, Any] = Field(default_factory=dict)
    warnings: list[dict[str, Any]] = Field(default_factory=list)


def blocks_in_words(blocks: Sequence[int] | None) -> str:
    """Format the number of blocks on each rank: as `4 x 1,024` if all ranks have the same number,
    otherwise as a list."""
    if blocks and len(set(blocks)) == 1:
        return f"{len(blocks)} x {blocks[0]:,}"
    return " ".join(f"{b:,}" for b in blocks or ())


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None, so that a record has no empty fields."""
    return {name: value for name, value in fields.items() if value is not None}
