"""Measurements of a run, in vLLM's names where vLLM has one.

The host counts. Stage times are stamped within rounds, on CUDA by the device's clock. They are read
with the round's verdict, which the host waits for anyway.
"""

from collections.abc import Sequence as Values
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from specdec_cli.core.stages import STAGES
from specdec_cli.core.types import Sequence


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles over prompts; all None when there is nothing to average."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Values[float]) -> "Spread":
        if not values:
            return cls(None, None, None, None)
        p50, p90, p99 = (float(np.percentile(values, p)) for p in (50, 90, 99))
        return cls(float(np.mean(values)), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of drafts and acceptances over sequence-rounds with k_i >= 1, and their rates.

    num_drafts: such rounds. num_draft_tokens: tokens proposed. num_accepted_tokens: proposals
    kept in the output. *_per_pos: by place in the draft, 1..k. Marginal rates are over all drafts,
    conditional ones over drafts that reached the place with all earlier proposals accepted.
    mean_acceptance_length: 1 + accepted / drafts, the target's own token included.
    acceptance_histogram: drafts by number accepted, 0..k.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]
    mean_acceptance_length: float
    draft_acceptance_rate: float | None
    acceptance_rate_per_pos: list[float]
    conditional_acceptance_rate_per_pos: list[float | None]
    acceptance_histogram: list[int]

    @classmethod
    def of(cls, proposed: Values[int], accepted: Values[int], k: int) -> "Acceptance":
        """From the proposal length and the accepted count of each sequence-round."""
        drafts = len(proposed)
        histogram = [0] * (k + 1)
        for count in accepted:
            histogram[count] += 1
        per_pos = [sum(histogram[i:]) for i in range(1, k + 1)]
        # Rounds that reached position i: it was proposed, and all before it were accepted.
        reached = [
            sum(1 for p, a in zip(proposed, accepted, strict=True) if p >= i and a >= i - 1)
            for i in range(1, k + 1)
        ]
        tokens = sum(proposed)
        total = sum(accepted)
        return cls(
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
            acceptance_histogram=histogram,
        )


@dataclass(frozen=True, slots=True)
class Metrics:
    """One run. Times in milliseconds unless the name says seconds.

    draft_ms, broadcast_ms, verify_ms, sample_ms, round_ms: means per engine round. broadcast_ms:
    sending proposals and decisions to the target's other ranks. It is meaningful on rank 0 only;
    elsewhere it contains the wait. prefill_ms: mean per prompt.
    ttft_ms: from a prompt's admission to its first token. tpot_ms: per token after the first.
    num_rounds: engine rounds, each of which serves several sequences.
    num_rounds_without_proposal: sequence-rounds, as drafts are. output_tokens_per_second counts
    prefill and decode time, decode_tokens_per_second decode time only.
    """

    k: int
    batch_size: int
    num_prompts: int
    num_output_tokens: int
    num_rounds: int
    num_rounds_without_proposal: int
    num_preemptions: int
    acceptance: Acceptance
    draft_ms: float
    broadcast_ms: float
    verify_ms: float
    sample_ms: float
    round_ms: float
    prefill_ms: float
    prefill_seconds: float
    decode_seconds: float
    output_tokens_per_second: float
    decode_tokens_per_second: float
    ttft_ms: Spread
    tpot_ms: Spread

    def as_dict(self) -> dict[str, Any]:
        """The contract's flat `metrics` object."""
        flat = asdict(self)
        acceptance: dict[str, Any] = flat.pop("acceptance")
        return flat | acceptance


@dataclass(slots=True)
class RunClock:
    """Sums of one run's times: by stage on the device's clock, by round on the host's."""

    device: torch.device
    num_rounds: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    stage_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def add_stages(self, milliseconds: dict[str, float]) -> None:
        """Add the times of one round's stages."""
        for name, spent in milliseconds.items():
            self.stage_ms[name] += spent

    def add_round(self, seconds: float) -> None:
        """Record a finished round and its time on the host's clock."""
        self.num_rounds += 1
        self.decode_seconds += seconds

    def finish(self) -> None:
        """Wait for the last round."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def summarise(seqs: list[Sequence], clock: RunClock, k: int, batch_size: int) -> Metrics:
    """Metrics of a finished run over `seqs`, without sequences that ended in an error."""
    done = [s for s in seqs if s.finish_reason != "error"]
    rounds = max(1, clock.num_rounds)
    tokens = sum(s.num_new_tokens for s in done)
    stage_ms = {stage: clock.stage_ms[stage] / rounds for stage in STAGES}
    ttft = [ms for s in done if (ms := s.ttft_ms) is not None]
    tpot = [ms for s in done if (ms := s.tpot_ms) is not None]
    seconds = clock.prefill_seconds + clock.decode_seconds
    return Metrics(
        k=k,
        batch_size=batch_size,
        num_prompts=len(done),
        num_output_tokens=tokens,
        num_rounds=clock.num_rounds,
        num_rounds_without_proposal=sum(s.rounds_without_proposal for s in done),
        num_preemptions=sum(s.num_preemptions for s in done),
        acceptance=Acceptance.of(
            [p for s in done for p in s.proposed_per_round],
            [a for s in done for a in s.accepted_per_round],
            k,
        ),
        draft_ms=stage_ms["draft"],
        broadcast_ms=stage_ms["broadcast"],
        verify_ms=stage_ms["verify"],
        sample_ms=stage_ms["sample"],
        round_ms=clock.decode_seconds * 1e3 / rounds,
        prefill_ms=clock.prefill_seconds * 1e3 / max(1, len(done)),
        prefill_seconds=clock.prefill_seconds,
        decode_seconds=clock.decode_seconds,
        output_tokens_per_second=tokens / seconds if seconds else 0.0,
        decode_tokens_per_second=tokens / clock.decode_seconds if clock.decode_seconds else 0.0,
        ttft_ms=Spread.of(ttft),
        tpot_ms=Spread.of(tpot),
    )
