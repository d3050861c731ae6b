"""Prefill: fills the caches of sequences, a chunk of tokens in one pass of each model.

On a device that runs asynchronously the host does not wait for a chunk. It prepares the next one,
or the first round, and counts the chunk's time afterwards.
"""

import time
from dataclasses import dataclass

from specdec_cli.core.batch import Span
from specdec_cli.core.types import Sequence
from specdec_cli.engine.metrics import Moment
from specdec_cli.engine.run import PrefillStep, Run
from specdec_cli.methods.base import Proposer
from specdec_cli.models.paged import PagedModel


@dataclass(frozen=True, slots=True)
class Chunk:
    """The spans of one step: those that the target is fed, and those of the proposer."""

    targets: list[Span]
    proposers: list[Span]


def next_chunk(run: Run, proposer: Proposer | None, budget: int) -> Chunk | None:
    """What the caches of the running sequences lack, at most `budget` tokens; None for nothing.

    The last token of each sequence is left to the first round. That round can so propose the very
    first output token, as in transformers' assisted generation. A proposer also lacks tokens after
    rounds that proposed nothing. One that reads the target's hidden states takes in what the target
    takes in, as there are no others.
    """
    reads = _reads_hidden(run, proposer)
    targets: list[Span] = []
    proposers: list[Span] = []
    for seq in run.scheduler.running:
        end = len(seq.tokens) - 1
        proposes = proposer is not None and run.scheduler.proposal_len(seq) > 0
        start, found = seq.target_kv, targets
        if start >= end and proposes and not reads and _is_behind(proposer, seq):
            start, found = seq.draft_kv, proposers
        if (length := min(budget, end - start)) <= 0:
            continue
        found.append(Span(seq, start, start + length))
        if (proposes or reads) and found is targets:
            proposers.append(targets[-1])
        budget -= length
    return Chunk(targets, proposers) if targets or proposers else None


def feed(
    run: Run, chunk: Chunk, target: PagedModel, proposer: Proposer | None, begun: float
) -> None:
    """Queue the passes over a chunk, then wait for those of the chunk before.

    begun: when the step began, seconds on the host's clock.
    """
    features = None
    if chunk.targets:
        features = target.prefill(chunk.targets, with_hidden=_reads_hidden(run, proposer))
    halfway = end = Moment(target.device)
    if chunk.proposers and proposer is not None:
        proposer.prefill(chunk.proposers, features)
        end = Moment(target.device)
    for span in chunk.targets:
        span.seq.target_kv = span.stop
    for span in chunk.proposers:
        span.seq.draft_kv = span.stop
    run.clock.num_prefills += 1
    run.clock.prefill_host_seconds += time.perf_counter() - begun
    queued = PrefillStep(
        begun=begun,
        halfway=halfway,
        end=end,
        seqs=list({span.seq for span in (*chunk.targets, *chunk.proposers)}),
        waiting=[seq for seq in run.scheduler.running if seq.first_token_at is None],
    )
    settle(run)
    run.prefill = queued


def settle(run: Run) -> None:
    """Wait for the passes in flight, if any, and count their time."""
    if (step := run.prefill) is None:
        return
    run.prefill = None
    of_draft = step.halfway.seconds_until(step.end)
    now = time.perf_counter()
    seconds = now - max(step.begun, run.prefilled_at)
    of_draft = min(of_draft, seconds)
    run.prefilled_at = now
    run.rounds.begin_after(now)
    run.clock.prefill_seconds += seconds
    for seq in step.seqs:
        seq.prefill_seconds += seconds / len(step.seqs)
    for seq in step.waiting:
        seq.target_prefill_seconds += seconds - of_draft
        seq.draft_prefill_seconds += of_draft


def _reads_hidden(run: Run, proposer: Proposer | None) -> bool:
    """Whether the run's proposer reads the target's hidden states."""
    return run.k > 0 and proposer is not None and bool(proposer.feature_layers)


def _is_behind(proposer: Proposer | None, seq: Sequence) -> bool:
    assert proposer is not None
    return len(seq.tokens) - seq.draft_kv > proposer.max_lag
