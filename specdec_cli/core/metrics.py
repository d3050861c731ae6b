"""Measurements of a run: its clock, and the figures that follow from it.

The host counts. Stage times are stamped within rounds, on CUDA by the device's clock. They are read
with the round's verdict, which the host waits for anyway. Imports no torch: the figures of a run
folder follow from its samples in the same way.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec_cli.core.figures import STAGES, Acceptance, Metrics, Spread
from specdec_cli.core.types import Sequence


@dataclass(slots=True)
class RunClock:
    """Sums of one run's times: by stage on the device's clock, by round on the host's.

    distinct_experts: likewise a sum over rounds, of `Outcome.distinct_experts`; None without any.
    prefill_host_seconds: those of `prefill_seconds` in which the host prepared and queued its
    `num_prefills` steps; on a CPU, all of them.
    """

    num_rounds: float = 0  # fractional when rounds are split between prompts of a batch
    prefill_seconds: float = 0.0
    prefill_host_seconds: float = 0.0
    num_prefills: int = 0
    decode_seconds: float = 0.0
    stage_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    distinct_experts: float | None = None

    def add_stages(self, milliseconds: dict[str, float]) -> None:
        """Add the times of one round's stages."""
        for name, spent in milliseconds.items():
            self.stage_ms[name] += spent

    def add_round(self, seconds: float, distinct_experts: float | None = None) -> None:
        """Record a finished round and its time on the host's clock."""
        self.num_rounds += 1
        self.decode_seconds += seconds
        if distinct_experts is not None:
            self.distinct_experts = (self.distinct_experts or 0.0) + distinct_experts


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


def summarise(seqs: list[Sequence], clock: RunClock, k: int, batch_size: int) -> Metrics:
    """Metrics of a finished run over `seqs`, without sequences that ended in an error."""
    done = [s for s in seqs if s.finish_reason != "error"]
    return metrics_of(
        done,
        clock,
        k=k,
        batch_size=batch_size,
        num_output_tokens=sum(s.num_new_tokens for s in done),
        ttft_ms=Spread.of([ms for s in done if (ms := s.ttft_ms) is not None]),
        tpot_ms=Spread.of([ms for s in done if (ms := s.tpot_ms) is not None]),
        **mean_parts(s.ttft_parts_ms for s in done),
    )


def mean_parts(parts: Iterable[dict[str, float] | None]) -> dict[str, dict[str, float]]:
    """`Metrics.ttft_parts_ms`, by its name: means over prompts; nothing if one has none."""
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
    done: Values[Counts], clock: RunClock, k: int, num_output_tokens: int, **others: Any
) -> Metrics:
    """The metrics of prompts that could run. others: figures that do not follow from the rest."""
    rounds = clock.num_rounds or 1
    from_prefill = sum(s.num_tokens_from_prefill for s in done)
    seconds = clock.prefill_seconds + clock.decode_seconds
    means = {f"{stage}_ms": spent / rounds for stage, spent in clock.stage_ms.items()}
    if shares := sum(len(s.proposed_per_round) + s.rounds_without_proposal for s in done):
        means["tokens_per_round"] = num_output_tokens / shares
    if clock.distinct_experts is not None:
        means["distinct_experts"] = clock.distinct_experts / rounds
    if from_prefill:
        others["num_tokens_from_prefill"] = from_prefill
    return Metrics(
        k=k,
        num_prompts=len(done),
        num_output_tokens=num_output_tokens,
        num_rounds=round(clock.num_rounds),
        num_rounds_without_proposal=sum(s.rounds_without_proposal for s in done),
        num_preemptions=sum(s.num_preemptions for s in done),
        round_ms=clock.decode_seconds * 1e3 / rounds,
        prefill_ms=clock.prefill_seconds * 1e3 / max(1, len(done)),
        prefill_seconds=clock.prefill_seconds,
        decode_seconds=clock.decode_seconds,
        output_tokens_per_second=num_output_tokens / seconds if seconds else 0.0,
        decode_tokens_per_second=(
            (num_output_tokens - from_prefill) / clock.decode_seconds
            if clock.decode_seconds
            else 0.0
        ),
        **means | others | acceptance_of(done, k).as_dict(),
    )


def acceptance_of(done: Values[Counts], k: int) -> Acceptance:
    """The acceptance of prompts over all of their rounds."""
    return Acceptance.of(
        [p for s in done for p in s.proposed_per_round],
        [a for s in done for a in s.accepted_per_round],
        k,
    )
