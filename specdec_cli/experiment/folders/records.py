"""The records that runs write, one JSON object per line.

Measuring, resuming, merging, reports and the JSON documents all use these classes. Imports no
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

_LONGEST = 1e12  # milliseconds, about 30 years
Time = Annotated[
    float, Field(ge=0, lt=_LONGEST)
]  # shares of rounds and mean counts have the same limit


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """The number of the target's ranks, and the number of those ranks that also hold the draft."""

    target_tp: int
    draft_tp: int

    @property
    def divides(self) -> bool:
        """True if the draft's degree divides the target's."""
        return self.target_tp % self.draft_tp == 0

    @classmethod
    def of(cls, found: "Key | Point | Sample | PairFacts") -> "Pair":
        """The pair of degrees in a record. A draft TP of 0 means k = 0."""
        return cls(found.target_tp or 0, found.draft_tp or 0)

    def __str__(self) -> str:
        return f"target TP {self.target_tp}, draft TP {self.draft_tp}"


@dataclass(frozen=True, slots=True)
class Key:
    """The point that a record belongs to. batch_size: the maximum number of concurrent requests; 0
    for no limit. target_tp, draft_tp: the degrees of a pair, in comparisons only; points of k = 0
    have no draft TP. request_rate: the rate at which requests arrive; None for closed batches."""

    draft: str | None
    batch_size: int
    k: int
    target_tp: int | None = None
    draft_tp: int | None = None
    request_rate: Rate | None = None

    @classmethod
    def of(cls, record: "Sample | Point | CurvePart | Stretch") -> "Key":
        others = (getattr(record, n, None) for n in ("target_tp", "draft_tp", "request_rate"))
        return cls(record.draft, record.batch_size, record.k, *others)

    def as_dict(self) -> dict[str, Any]:
        """The key as record fields."""
        point = {"draft": self.draft, "batch_size": self.batch_size, "k": self.k}
        others = {n: getattr(self, n) for n in ("target_tp", "draft_tp", "request_rate")}
        return point | given(**others)


class OfPoint(Record):
    """A record that belongs to a point."""

    def as_dict(self) -> dict[str, Any]:
        """The record as written to the folder. At k = 0 the draft is left out, whichever arm
        measured it, so that the records of a point name it alike in all files."""
        found = super().as_dict()
        return found | {"draft": None} if found["k"] == 0 and "draft" in found else found


class Sample(OfPoint):
    """One prompt at one point, a line of samples.jsonl. The contract defines the fields up to
    `seconds`; the fields after it are there to compute metrics.

    target_tp, draft_tp: the degrees of a pair, in comparisons only. Each list of times has one
    value per repeat. Summed over all prompts, the shares equal the engine's time, rounds and
    stages. error: the reason why a prompt could not run, if `finish_reason` is "error".
    num_tokens_from_prefill: as in `Metrics`; `rounds_without_proposal` includes these tokens, but
    times and shares of rounds do not. ttft_parts_ms: the parts of `ttft_ms`, one list for each
    part. distinct_experts: as in `Metrics`, over the prompt's own rounds, one value per repeat;
    None if experts are not counted.

    Only samples from servers have the following fields, because servers count rounds differently.
    engine: facts about the server. acceptance_histogram: the number of rounds by accepted
    proposals, if the order of rounds is unknown. counted: the sums of the server's counters over
    all requests that ran together; only one of these requests has them. num_tokens, text: the
    number of output tokens and their text, if the server sent no token ids. remarks: codes of
    warnings.

    If requests arrive at a rate, each request has its own sample, with one value in each list.
    request: the number of the request, from 0. due: the due time, in seconds after that of the
    first request. send_lag_ms: how late a request was sent, for servers.
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
        """The number of rounds with proposals, as far as known."""
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
        """The mean of `values`, one per repeat, without repeats whose time is an outlier."""
        if len(values) == len(self.decode_seconds):
            values = [values[place] for place in usual_repeats(self.decode_seconds)]
        return sum(values) / len(values) if values else 0.0

    @model_validator(mode="after")
    def _rounds_are_possible(self) -> Self:
        proposed, accepted = self.proposed_per_round, self.accepted_per_round
        if len(proposed) != len(accepted):
            raise impossible("accepted_per_round and proposed_per_round differ in length")
        if any(a > p or p > self.k for p, a in zip(proposed, accepted, strict=True)):
            raise impossible("more was accepted than proposed, or more proposed than k")
        if self.num_tokens_from_prefill > self.rounds_without_proposal:
            raise impossible("num_tokens_from_prefill exceeds rounds_without_proposal")
        if len(self.acceptance_histogram or ()) > self.k + 1:
            raise impossible("its acceptance_histogram has more than k + 1 entries")
        if self.counted and len(self.counted.num_accepted_tokens_per_pos) != self.k:
            raise impossible("its counters do not have one value for each of k positions")
        return self


FEWEST = 3  # minimum prompts for an interval; two would give one that spans several powers of ten
OUTLYING = 1.5  # a repeat is an outlier above this many times the fastest repeat's time


def usual_repeats(seconds: Sequence[float]) -> list[int]:
    """Return the indices of the repeats that did not take far longer than the fastest.

    Repeats do the same work, and a disturbance only adds time. So the fastest repeat is the
    reliable one, even if most repeats were disturbed.
    """
    fastest = min(seconds, default=0.0)
    return [place for place, value in enumerate(seconds) if value <= OUTLYING * fastest]


class CategoryMetrics(Record):
    """Figures of a point over the prompts of one category, named as in `Point`."""

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
        """Return the figure with this name, like `Point.number`."""
        value: float | None = getattr(self, name, None)
        return value


class BreakEven(Record):
    """The acceptance at which a point is as fast as plain decoding, given the costs of its rounds.

    tokens_per_round: the tokens that a round must write to break even: the cost of a sequence's
    round divided by that of a round at k = 0, which writes one token. The ratio covers all rounds,
    like `Metrics.tokens_per_round`. draft_acceptance_rate: the ratio of accepted to proposed tokens
    that yields this many tokens. alpha: the chance of acceptance of each proposal that yields this
    many tokens in the geometric model (`forecasts.iid_length`). The rate and alpha are 0 if rounds
    cost no more than those of plain decoding, and None if accepting everything would not be enough.
    is_predicted: whether the costs come from the time curve.
    """

    tokens_per_round: Figure
    tokens_per_round_ci: Interval
    draft_acceptance_rate: Figure
    alpha: Figure
    is_predicted: bool = False


class Prediction(Record):
    """Predicted figures of a point, from the run at the largest k. All errors are relative.

    speedup_ci: the 95 % interval of the speed-up. speedup_error_ci: the 95 % interval of its error,
    over the measured prompts. drafts_of_k: the k whose proposals the prediction used, if the
    method's proposals depend on k; otherwise absent.
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


class Stretch(OfPoint):
    """The measured window of a point at a rate, a line of load.jsonl. The point's samples are
    complete once this line is written. window_seconds: the time from the first measured due time to
    the last, plus the mean time between requests; if all requests arrive at once, the time to the
    last answer. num_requests: the number of measured requests. num_answered: the number of answers
    in the window, including those to requests that are not measured. num_unmeasured: the number of
    requests that were due but not measured. max_in_flight: the largest number of requests that were
    due and not yet answered. crowding: the number of requests that an interval of goodput needs,
    divided by the number in the window. shard: the number of the shard, in merged folders."""

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
    """Further figures of a point at a rate; see docs/load.md. offered_rate, goodput: None if all
    requests arrive at once. slo: the objectives in milliseconds, by the name of their figure."""

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


def rate_name(rate: Rate) -> str:
    return f"{float(rate):g}"


def rate_in_words(rate: Rate) -> str:
    return "all requests at once" if rate == "inf" else f"{rate_name(rate)} requests/s"


class Point(OfPoint):
    """A line of points.jsonl, and an entry of a document's `points`.

    Points of sweeps have `draft` and predictions, but no degrees. Points of comparisons have
    degrees (`draft_tp` is None at k = 0) and the fields after `prediction`. request_rate, load: set
    only if requests arrive at a rate. engine, num_retries: set only for servers. *_ci: the 95 %
    intervals of figures of `metrics`. break_even: the acceptance needed to be as fast as plain
    decoding; None at k = 0. impossible_speedup: a measured speed ratio beyond what speculation can
    reach; then `speedup` is None.
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
        """The point's rate and batch size, for sorting. Points of one level are compared."""
        return float(self.request_rate or 0.0), self.batch_size

    @property
    def level_in_words(self) -> str:
        if self.request_rate is None:
            return f"batch size {self.batch_size}"
        return rate_in_words(self.request_rate)

    @property
    def is_baseline(self) -> bool:
        """True if this is plain decoding."""
        return self.k == 0

    @property
    def is_predicted(self) -> bool:
        """True if the run was told to predict this point instead of measuring it."""
        return self.status == "skipped" and self.predicted_speedup is not None

    def number(self, name: str, part: str | None = None) -> float | None:
        """Return a figure of the point or, if it has no such field, of its metrics; None if not
        measured.

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


class _PartCounts(OfPoint):
    draft: Name | None
    batch_size: Count
    k: Count
    part: Count
    sequence_rounds: Count
    rounds: Count
    decode_seconds: float


class CurvePart(StageTimes, _PartCounts):
    """A line of curve.jsonl: one part of the time curve at one k.

    shard: the number of the shard that measured the part, in merged folders. Times and
    distinct_experts are sums over rounds.
    """

    distinct_experts: Figure = None
    shard: Count | None = None


class PairFacts(Record):
    """A line of pairs.jsonl: the caches of a pair whose models were loaded. warnings: the warnings
    so far about the machine while the pair was measured."""

    target_tp: Count
    draft_tp: Count
    num_blocks: Count
    blocks_per_rank: list[Count]
    load_seconds: Time | None = None
    execution: dict[str, Any] = Field(default_factory=dict)
    warnings: list[dict[str, Any]] = Field(default_factory=list)


def blocks_in_words(blocks: Sequence[int] | None) -> str:
    """Write the number of blocks on each rank: as `4 x 1,024` if all ranks have the same number,
    otherwise as a list."""
    if blocks and len(set(blocks)) == 1:
        return f"{len(blocks)} x {blocks[0]:,}"
    return " ".join(f"{b:,}" for b in blocks or ())


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None, so that a record has no empty fields."""
    return {name: value for name, value in fields.items() if value is not None}
