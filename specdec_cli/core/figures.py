"""Metrics of runs and measurements, and `Record`, the base class of all data stored in files.

The engine computes metrics, run folders store them and reports read them. Metrics that vLLM also
has keep vLLM's names. A file may be damaged or edited, so every field is checked when it is read.
The times of a round's stages are measured with the device's clock on CUDA. This module does not
import torch.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Protocol, Self

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from specdec_cli.core import types

# Readable names for the parts of the time to the first token.
TTFT_PARTS = {
    "target_prefill": "target's prefill",
    "draft_prefill": "draft's prefill",
    "first_round": "first round",
    "queue": "queued before",
}
_MOST = 2**63  # one more than the largest int64; Python's own integers have no limit


def _none_if_infinite(value: Any) -> Any:
    ends = value if isinstance(value, list) else [value]
    is_finite = all(not isinstance(end, float) or math.isfinite(end) for end in ends)
    return value if is_finite else None


Name = InstanceOf[str]  # unlike `str`, also takes text that is not valid Unicode
Count = Annotated[int, Field(ge=0, lt=_MOST)]
Whole = Annotated[int, Field(gt=-_MOST, lt=_MOST)]
# The number of concurrent requests. 0 means no limit, which files store as null.
Slots = Annotated[
    Count, BeforeValidator(lambda value: value or 0), PlainSerializer(lambda value: value or None)
]
# Requests per second; "inf" means all at once.
Rate = Annotated[float, Field(gt=0)] | Literal["inf"]
_Ends = Annotated[list[float], Field(min_length=2, max_length=2)]
# Files store NaN and infinity as null, so they become None in memory, too.
Figure = Annotated[float | None, BeforeValidator(_none_if_infinite)]
Interval = Annotated[_Ends | None, BeforeValidator(_none_if_infinite)]


class Record(BaseModel):
    """A JSON object in a file, such as one line of a JSON Lines file or an object nested in a line.
    Unknown fields are kept. Fields that were never set are not written."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="allow")

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


def impossible(told: str) -> PydanticCustomError:
    """Make the error that a record's own checks raise. told: the description of the problem."""
    return PydanticCustomError("impossible", "{told}", {"told": told})


class Spread(Record):
    """Mean and percentiles over prompts; all None when there is nothing to average."""

    mean: Figure
    p50: Figure
    p90: Figure
    p99: Figure

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        if not values:
            return cls(mean=None, p50=None, p90=None, p99=None)
        p50, p90, p99 = map(float, np.percentile(values, (50, 90, 99)))
        return cls(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99)


class Acceptance(Record):
    """Counts of proposed and accepted tokens, and their rates.

    A draft is the proposal of one sequence in one round; empty proposals are not counted. Figures
    that a server does not report are None.

    num_drafts: the number of drafts.
    *_per_pos: one value for each position in the draft, 1..k.
    acceptance_rate_per_pos: the share of all drafts whose token at the position was accepted.
    conditional_acceptance_rate_per_pos: the same share, but only among drafts that proposed a token
    at the position and had all earlier tokens accepted.
    mean_acceptance_length: 1 + accepted tokens / drafts; the 1 is the target's own token.
    acceptance_histogram: the number of drafts with 0..k accepted tokens.
    """

    num_drafts: Count | None
    num_draft_tokens: Count | None
    num_accepted_tokens: Count | None
    num_accepted_tokens_per_pos: list[Count] | None
    mean_acceptance_length: Figure
    draft_acceptance_rate: Figure
    acceptance_rate_per_pos: list[float] | None
    conditional_acceptance_rate_per_pos: list[Figure] | None
    acceptance_histogram: list[Count] | None

    @classmethod
    def of(cls, proposed: Sequence[int], accepted: Sequence[int], k: int) -> "Acceptance":
        """Compute the acceptance from two numbers for each draft: how many tokens it proposed, and
        how many of them were accepted. k: the maximum number of tokens in a draft."""
        histogram = [0] * (k + 1)
        for count in accepted:
            histogram[count] += 1
        # Drafts that reached position i: they proposed it, and all earlier tokens were accepted.
        reached = [
            sum(1 for p, a in zip(proposed, accepted, strict=True) if p >= i and a >= i - 1)
            for i in range(1, k + 1)
        ]
        return cls._counted(histogram, reached, sum(proposed))

    @classmethod
    def of_histogram(cls, histogram: Sequence[int], tokens: int) -> "Acceptance":
        """Compute the acceptance when every draft has k tokens.

        histogram: k + 1 counts, the numbers of drafts with 0..k accepted tokens.
        tokens: the number of proposed tokens, as the server counts them.
        """
        reached = [sum(histogram[i:]) for i in range(len(histogram) - 1)]
        return cls._counted(histogram, reached, tokens)

    @classmethod
    def unknown(cls) -> "Acceptance":
        return Acceptance(**dict.fromkeys(cls.model_fields))

    @classmethod
    def _counted(
        cls, histogram: Sequence[int], reached: Sequence[int], tokens: int
    ) -> "Acceptance":
        drafts = sum(histogram)
        per_pos = [sum(histogram[i:]) for i in range(1, len(histogram))]
        total = sum(per_pos)
        return Acceptance(
            num_drafts=drafts,
            num_draft_tokens=tokens,
            num_accepted_tokens=total,
            num_accepted_tokens_per_pos=per_pos,
            mean_acceptance_length=1.0 + (total / drafts if drafts else 0.0),
            draft_acceptance_rate=total / tokens if tokens else None,
            acceptance_rate_per_pos=[n / drafts if drafts else 0.0 for n in per_pos],
            conditional_acceptance_rate_per_pos=[
                n / r if r else None for n, r in zip(per_pos, reached, strict=True)
            ],
            acceptance_histogram=list(histogram),
        )


class EngineFacts(Record):
    """The engine that a point or a sample was measured on.

    acceptance_source: where the acceptance figures come from; None if acceptance is unknown.
    - per_request: the details that the server reports about each request.
    - counters: the increase of the server's counters during the requests.
    - chunks: the sizes of the streamed chunks, if the counters show that each was one round.
    """

    kind: Name
    version: Name | None
    acceptance_source: Literal["per_request", "counters", "chunks"] | None


class Counted(Record):
    """The increase of a server's counters during a group of requests."""

    num_drafts: Count
    num_draft_tokens: Count
    num_accepted_tokens_per_pos: list[Count]


class InText(Record):
    """A server's acceptance, counted as our own engine counts it: only rounds with proposals, and
    only accepted tokens that are in the final texts."""

    num_drafts: Count
    num_accepted_tokens: Count
    mean_acceptance_length: float


class StageTimes(Record):
    """The time of each stage of a round, in milliseconds. The stages are in the order in which they
    run, and `STAGES` is derived from these fields. Servers do not report these times."""

    draft_ms: Figure = None
    broadcast_ms: Figure = 0.0
    verify_ms: Figure = None
    sample_ms: Figure = None
    commit_ms: Figure = 0.0

    def stage_ms(self, stage: str) -> float:
        return float(getattr(self, f"{stage}_ms") or 0.0)


STAGES = tuple(name.removesuffix("_ms") for name in StageTimes.model_fields)


def stages_in(found: Iterable[StageTimes | None]) -> list[str]:
    """Return the stages that took any time, in order. Some stages never run: a single rank does not
    broadcast, and most methods do nothing in `commit`."""
    every = [times for times in found if times is not None]
    return [stage for stage in STAGES if any(times.stage_ms(stage) > 0 for times in every)]


class _RunCounts(Record):
    k: Count
    batch_size: Slots
    num_prompts: Count
    num_output_tokens: Count
    num_rounds: Count | None
    num_rounds_without_proposal: Count
    num_preemptions: Count = 0


class Times(StageTimes, _RunCounts):
    """The fields of `Metrics` that come before the fields of `Acceptance`. `Metrics` explains
    them."""

    round_ms: Figure
    prefill_ms: Figure = None
    prefill_seconds: Figure = None
    decode_seconds: float
    output_tokens_per_second: float
    decode_tokens_per_second: float
    ttft_ms: Spread
    tpot_ms: Spread


class Metrics(Acceptance, Times):
    """The object `metrics` that JSON files contain for each run and for each measured point: the
    fields of `Times`, then those of `Acceptance`, then those below.

    Times are in milliseconds unless the name says seconds. An engine round serves all sequences of
    the batch; a sequence-round is one sequence in one round.

    draft_ms, broadcast_ms, verify_ms, sample_ms, commit_ms, round_ms: means per engine round.
    broadcast_ms: the time to send proposals and decisions to the target's other ranks. On ranks
    other than 0 it includes the wait for the draft.
    commit_ms: the time of the proposer's work after the decision.
    prefill_ms: the mean per prompt.
    ttft_ms: the time from a prompt's admission to its first token.
    tpot_ms: the time per token after the first.
    num_rounds_without_proposal: counted in sequence-rounds, like `num_drafts`.
    output_tokens_per_second: the rate over prefill and decode time.
    decode_tokens_per_second: the rate over decode time only.
    peak_memory_bytes: None unless the command that runs the engine adds it.
    distinct_experts: the number of experts whose weights the target reads in a layer during
    scoring, averaged over rounds and over layers with experts.
    tokens_per_round: output tokens per sequence-round.
    num_tokens_from_prefill: at k = 0, the number of output tokens that prefill decided. Each counts
    as a sequence-round without proposal, but not as an engine round, and
    decode_tokens_per_second leaves it out.
    ttft_parts_ms: see `core.types.Sequence`; absent if a prompt has no first token.
    e2el_ms: the time from sending a request to its last token.
    in_text: see `InText`; only servers have it.

    If requests are sent at a rate, all latencies are measured from the time when a request is due.
    Servers report no stage times and no prefill times. For servers whose rounds are unknown,
    num_rounds and round_ms are None.
    """

    peak_memory_bytes: Count | None = None
    distinct_experts: Figure = None
    tokens_per_round: Figure = None
    num_tokens_from_prefill: Count = 0
    ttft_parts_ms: dict[str, float] | None = None
    e2el_ms: Spread | None = None
    in_text: InText | None = None

    @model_validator(mode="after")
    def _has_k_positions(self) -> Self:
        if self.acceptance_histogram is None:  # acceptance is not known
            return self
        lengths = {
            len(self.num_accepted_tokens_per_pos or ()),
            len(self.acceptance_rate_per_pos or ()),
            len(self.conditional_acceptance_rate_per_pos or ()),
            len(self.acceptance_histogram) - 1,
        }
        if lengths != {self.k}:
            raise impossible("its metrics do not have one value for each of k positions")
        return self


class Counts(Protocol):
    """The counts of one prompt's rounds."""

    @property
    def proposed_per_round(self) -> list[int]: ...
    @property
    def accepted_per_round(self) -> list[int]: ...
    @property
    def rounds_without_proposal(self) -> int: ...
    @property
    def num_tokens_from_prefill(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...


def summarise(seqs: list[types.Sequence], k: int, batch_size: int) -> Metrics:
    """Compute the metrics of a finished run over `seqs`. Sequences that ended in an error are left
    out."""
    done = [s for s in seqs if s.finish_reason != "error"]
    experts = [s.experts_share for s in done if s.experts_share is not None]
    return metrics_of(
        done,
        num_rounds=sum(s.round_share for s in done),
        prefill_seconds=sum(s.prefill_seconds for s in done),
        decode_seconds=sum(s.decode_seconds for s in done),
        stage_ms={x: sum(s.stage_ms.get(x, 0.0) for s in done) for x in STAGES},
        distinct_experts=sum(experts) if experts else None,
        k=k,
        batch_size=batch_size,
        num_output_tokens=sum(s.num_new_tokens for s in done),
        ttft_ms=Spread.of([ms for s in done if (ms := s.ttft_ms) is not None]),
        tpot_ms=Spread.of([ms for s in done if (ms := s.tpot_ms) is not None]),
        **mean_parts(s.ttft_parts_ms for s in done),
    )


def mean_parts(parts: Iterable[dict[str, float] | None]) -> dict[str, dict[str, float]]:
    """Average each part of the time to the first token over all prompts.

    Returns {"ttft_parts_ms": milliseconds by part}, to pass to `Metrics` as a keyword argument.
    Returns {} if there are no prompts or if any prompt has no parts.
    """
    found = list(parts)
    known = [part for part in found if part is not None]
    if not known or len(known) < len(found):
        return {}
    names = dict.fromkeys(name for part in known for name in part)
    return {
        "ttft_parts_ms": {
            name: sum(part.get(name, 0.0) for part in known) / len(known) for name in names
        }
    }


def metrics_of(
    done: Sequence[Counts],
    *,
    num_rounds: float,
    prefill_seconds: float,
    decode_seconds: float,
    stage_ms: dict[str, float],
    distinct_experts: float | None,
    k: int,
    num_output_tokens: int,
    **others: Any,
) -> Metrics:
    """Compute metrics from sums over prompts. A round serves several prompts, so each prompt is
    assigned a share of the round's time, of its stage times and of the experts that it reads.

    done: the prompts that ended without an error.
    num_rounds: the sum of the prompts' shares of rounds. For the prompts of a whole run it is an
    integer, up to rounding errors.
    distinct_experts: the sum of the prompts' shares; None if the target has no experts.
    others: fields of `Metrics` that cannot be computed from the rest.
    """
    rounds = num_rounds or 1
    from_prefill = sum(s.num_tokens_from_prefill for s in done)
    seconds = prefill_seconds + decode_seconds
    means = {f"{stage}_ms": spent / rounds for stage, spent in stage_ms.items()}
    if shares := sum(len(s.proposed_per_round) + s.rounds_without_proposal for s in done):
        means["tokens_per_round"] = num_output_tokens / shares
    if distinct_experts is not None:
        means["distinct_experts"] = distinct_experts / rounds
    if from_prefill:
        others["num_tokens_from_prefill"] = from_prefill
    return Metrics(
        k=k,
        num_prompts=len(done),
        num_output_tokens=num_output_tokens,
        num_rounds=round(num_rounds),
        num_rounds_without_proposal=sum(s.rounds_without_proposal for s in done),
        num_preemptions=sum(s.num_preemptions for s in done),
        round_ms=decode_seconds * 1e3 / rounds,
        prefill_ms=prefill_seconds * 1e3 / max(1, len(done)),
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        output_tokens_per_second=num_output_tokens / seconds if seconds else 0.0,
        decode_tokens_per_second=(
            (num_output_tokens - from_prefill) / decode_seconds if decode_seconds else 0.0
        ),
        **means | others | acceptance_of(done, k).as_dict(),
    )


def acceptance_of(done: Sequence[Counts], k: int) -> Acceptance:
    """Compute the acceptance over all rounds of the prompts."""
    return Acceptance.of(
        [p for s in done for p in s.proposed_per_round],
        [a for s in done for a in s.accepted_per_round],
        k,
    )
