"""Prefill: fills the caches of sequences, a chunk of tokens in one pass of each model.

In plain decoding the pass that feeds a prompt's last token also decides the first output token. On
a device that runs asynchronously the host does not wait for a chunk. It prepares the next one, or
the first round, and counts the chunk's time afterwards.
"""

import time
from dataclasses import dataclass

import torch

from specdec_cli.core.batch import Span
from specdec_cli.core.sampling import next_tokens
from specdec_cli.core.types import Sequence
from specdec_cli.engine.metrics import Moments
from specdec_cli.engine.run import Drawn, PrefillStep, Run
from specdec_cli.methods.base import Proposer
from specdec_cli.models.paged import PagedModel
from specdec_cli.models.prompt_passes import Results


@dataclass(frozen=True, slots=True)
class Chunk:
    """The spans of one step: those that the target is fed, and those of the proposer.

    ending: the first spans of the target, as many as feed the last token of a sequence.
    """

    targets: list[Span]
    proposers: list[Span]

    @property
    def ending(self) -> list[Span]:
        return [span for span in self.targets if span.stop == len(span.seq.tokens)]


def next_chunk(run: Run, proposer: Proposer | None, budget: int) -> Chunk | None:
    """What the caches of the running sequences lack, at most `budget` tokens; None for nothing.

    If the run proposes, the last token of each sequence is left to the first round. That round can
    so propose the very first output token, as in transformers' assisted generation. In plain
    decoding the last token is fed too, unless it alone is missing: then a round takes it.

    A proposer also lacks tokens after rounds that proposed nothing. One that reads the target's
    hidden states takes in what the target takes in, as there are no others.
    """
    reads = _reads_hidden(run, proposer)
    may_propose = run.k > 0 and proposer is not None
    targets: list[Span] = []
    proposers: list[Span] = []
    for seq in run.scheduler.running:
        end = len(seq.tokens) - 1
        if run.k == 0 and seq.target_kv < end:
            end += 1
        proposes = may_propose and run.scheduler.proposal_len(seq) > 0
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
    run: Run,
    chunk: Chunk,
    target: PagedModel,
    proposer: Proposer | None,
    moments: Moments,
    begun: float,
) -> list[tuple[Sequence, int]]:
    """Queue the passes over a chunk, then wait for those of the chunk before; returns their tokens.

    moments: of the target's device. begun: when the step began, seconds on the host's clock.
    """
    features = drawn = None
    if chunk.targets:
        ending = chunk.ending if run.k == 0 else []
        assert ending == chunk.targets[: len(ending)], "only the last span can be cut"
        found = target.prefill(
            chunk.targets,
            with_hidden=_reads_hidden(run, proposer),
            num_logits=len(ending),
            draws=run.params,
        )
        features = found.hidden
        if ending:
            drawn = _drawn(run, [span.seq for span in ending], found)
    halfway = end = moments.now()
    if chunk.proposers and proposer is not None:
        proposer.prefill(chunk.proposers, features)
        end = moments.now()
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
        waiting=[seq for seq in run.scheduler.running if not _has_token(run, seq)],
        drawn=drawn,
    )
    decided = settle(run)
    run.prefill = queued
    return decided


def _has_token(run: Run, seq: Sequence) -> bool:
    """Whether a sequence's first token is decided, though the host may not have read it yet."""
    return seq.first_token_at is not None or (run.drawn is not None and seq in run.drawn.seqs)


def _drawn(run: Run, seqs: list[Sequence], found: Results) -> Drawn:
    """The next token of each of `seqs`, on its way to the host."""
    if found.tokens is not None and found.told is not None:
        return Drawn(seqs, found.tokens, found.told)
    tokens = _draw(run, seqs, found.logits)
    on_host = torch.empty(len(seqs), dtype=torch.int64, pin_memory=tokens.is_cuda)
    return Drawn(seqs, tokens, on_host.copy_(tokens, non_blocking=True).numpy())


@torch.inference_mode()
def _draw(run: Run, seqs: list[Sequence], logits: torch.Tensor | None) -> torch.Tensor:
    """Decide the next token of each of `seqs`, whose tokens the target has all been fed.

    logits: [R, V], a row a sequence. Returns rank 0's decision, int64 [R], on every rank.
    """
    assert logits is not None, "a pass that draws nothing returns them"
    device, parallel = logits.device, run.rounds.parts.parallel
    # Rows of 16 bytes: Triton compiles a kernel again for an address that it knows less of.
    spare = [0] * (len(seqs) % 2)
    rows = [[s.noise_key for s in seqs] + spare, [len(s.tokens) for s in seqs] + spare]
    rows.append([run.params.seed] + [0] * (len(rows[0]) - 1))
    on_host = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    sent = on_host.to(device, non_blocking=True)
    index, length = sent[:2, : len(seqs)]
    tokens = torch.zeros_like(length)
    if parallel.is_first:
        tokens = next_tokens(logits, run.params, sent[2, 0], index, length)
    return parallel.broadcast(tokens) if parallel.size > 1 else tokens


def must_settle(run: Run) -> bool:
    """True if the host has to know the tokens that passes in flight decide before it launches a
    round: all of them may be the last, or there may be no room for a round after them."""
    if run.drawn is None:
        return False
    drawn, scheduler = set(run.drawn.seqs), run.scheduler
    ends = (s in drawn and len(s.tokens) + 1 >= s.max_tokens for s in scheduler.running)
    return all(ends) or scheduler.is_short(1)


def settle(run: Run) -> list[tuple[Sequence, int]]:
    """Wait for the passes in flight, if any, and count their time; returns what they decided."""
    if (step := run.prefill) is None:
        return []
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
    if step.drawn is None:
        return []
    # What is on the host may be longer. It is not cut while the device waits for its pass.
    return list(zip(step.drawn.seqs, step.drawn.on_host.tolist(), strict=False))


def _reads_hidden(run: Run, proposer: Proposer | None) -> bool:
    """Whether the run's proposer reads the target's hidden states."""
    return run.k > 0 and proposer is not None and bool(proposer.feature_layers)


def _is_behind(proposer: Proposer | None, seq: Sequence) -> bool:
    assert proposer is not None
    return len(seq.tokens) - seq.draft_kv > proposer.max_lag
