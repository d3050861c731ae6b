"""Prefill: fills the caches of sequences in chunks. Each model processes a chunk in one pass.

In plain decoding, prefill also decides the first output token. On a GPU, the host does
not wait for the passes over a chunk: it reads their tokens and times during the next step.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import torch

from specdec_cli.core.batch import Span
from specdec_cli.core.packed import Tokens
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.sampling import next_tokens
from specdec_cli.core.types import SamplingParams, Sequence
from specdec_cli.engine.scheduler import Scheduler
from specdec_cli.methods.base import Proposer
from specdec_cli.models.paged import PagedModel
from specdec_cli.models.prompt_passes import Results


class Moment:
    """A point in time on the device.

    event: an event that this class records in the device's queue. It completes when all work queued
        before it is done. None on a CPU, where the host's clock is used.
    """

    def __init__(self, event: torch.Event | None = None) -> None:
        self._at = time.perf_counter()
        self._event = event
        if event is not None:
            event.record()

    def seconds_until(self, later: "Moment") -> float:
        """Wait until the device has reached `later`, and return the seconds from this moment to
        it."""
        if self._event is None or later._event is None:
            return later._at - self._at
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1e3


class Moments:
    """Creates `Moment` objects on one device. They use AT_ONCE events in turn, so only the last
    AT_ONCE moments are valid. Events are reused because recording a new one for the first time is
    slow."""

    AT_ONCE = 4  # two moments for each of two steps in flight

    def __init__(self, device: torch.device) -> None:
        is_queue, number = device.type == "cuda", self.AT_ONCE
        made = [torch.Event(device, enable_timing=True) for _ in range(number) if is_queue]
        self._events: Iterator[torch.Event | None] = cycle(made or [None])

    def now(self) -> Moment:
        """Return the current moment. It is valid until `now` has been called AT_ONCE more times."""
        return Moment(next(self._events))


@dataclass(frozen=True, slots=True)
class Chunk:
    """The spans of tokens to feed to the target and to the proposer in one step. `ending` lists the
    target's spans that include the last token of their sequence."""

    targets: list[Span]
    proposers: list[Span]

    @property
    def ending(self) -> list[Span]:
        return [span for span in self.targets if span.stop == len(span.seq.tokens)]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next token of each of `seqs`, decided by a prefill pass. A token is -1 if its logits were
    not finite.

    on_device: int64 [R], valid until the next pass. on_host: the same tokens, valid once the pass
    has ended; it may have more than R entries.
    """

    seqs: list[Sequence]
    on_device: torch.Tensor
    on_host: Tokens


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """The passes over one chunk, which are queued on the device and may still be running.

    begun: the start of the step, in seconds on the host's clock.
    halfway: the end of the target's pass, where the proposer's pass begins.
    end: the end of the last pass.
    seqs: the sequences whose tokens are in the chunk.
    waiting: the running sequences whose first output token was not decided before this chunk.
    drawn: the tokens that the passes decide; None if they decide none.
    """

    begun: float
    halfway: Moment
    end: Moment
    seqs: list[Sequence]
    waiting: list[Sequence]
    drawn: Drawn | None = None


@dataclass(slots=True)
class Prefill:
    """Runs the prefill passes of one run. At most one step is in flight.

    budget: the maximum number of tokens per chunk.
    parallel: the ranks of the target.
    moments: records times on the target's device.
    ended_at: when the host read the results of the last step, in seconds on the host's clock.
    """

    target: PagedModel
    proposer: Proposer | None
    params: SamplingParams
    scheduler: Scheduler
    budget: int
    parallel: TensorParallel
    moments: Moments
    ended_at: float = 0.0
    _step: PrefillStep | None = None

    @property
    def drawn(self) -> Drawn | None:
        """The tokens that the passes in flight will decide; None if no pass in flight decides
        any."""
        return self._step.drawn if self._step is not None else None

    def next_chunk(self) -> Chunk | None:
        """Choose the next tokens to prefill, at most `budget`: tokens of running sequences that are
        not yet in the target's or the proposer's cache. Return None if there are no such tokens.

        - With proposals, prefill leaves the last token of each sequence to the first round, which
          can then propose even the first output token.
        - In plain decoding, prefill also feeds the last token, and so decides the first output
          token. If only the last token is missing, or if logits are processed, a round feeds the
          last token instead.
        - After rounds without proposals, the proposer's cache lacks tokens that the target's has.
          Prefill feeds them to the proposer alone.
        - A proposer that reads hidden states gets the same tokens as the target.
        """
        proposer, reads, budget = self.proposer, self._reads_hidden, self.budget
        targets: list[Span] = []
        proposers: list[Span] = []
        for seq in self.scheduler.running:
            end = len(seq.tokens) - 1
            if self._decides and seq.target_kv < end:
                end += 1
            proposes = proposer is not None and self.scheduler.proposal_len(seq) > 0
            start, found = seq.target_kv, targets
            if proposer is not None and proposes and start >= end and not reads:
                if len(seq.tokens) - seq.draft_kv > proposer.max_lag:
                    start, found = seq.draft_kv, proposers
            if (length := min(budget, end - start)) <= 0:
                continue
            found.append(Span(seq, start, start + length))
            if (proposes or reads) and found is targets:
                proposers.append(targets[-1])
            budget -= length
        return Chunk(targets, proposers) if targets or proposers else None

    def feed(self, chunk: Chunk, begun: float) -> list[tuple[Sequence, int]]:
        """Queue the passes over a chunk. Then wait for the previous chunk with `settle`, and return
        the tokens that its passes decided. begun: the start of the step, in seconds on the host's
        clock."""
        features = drawn = None
        if chunk.targets:
            ending = chunk.ending if self._decides else []
            assert ending == chunk.targets[: len(ending)], "only the last span can be split"
            found = self.target.prefill(
                chunk.targets,
                with_hidden=self._reads_hidden,
                num_logits=len(ending),
                draws=self.params,
            )
            features = found.hidden
            if ending:
                drawn = self._drawn([span.seq for span in ending], found)
        halfway = end = self.moments.now()
        if chunk.proposers and self.proposer is not None:
            self.proposer.prefill(chunk.proposers, features)
            end = self.moments.now()
        for span in chunk.targets:
            span.seq.target_kv = span.stop
        for span in chunk.proposers:
            span.seq.draft_kv = span.stop
        # Passes that are in flight decide the first output tokens of the sequences in `before`.
        running, before = self.scheduler.running, self.drawn.seqs if self.drawn is not None else ()
        queued = PrefillStep(
            begun=begun,
            halfway=halfway,
            end=end,
            seqs=list({span.seq for span in (*chunk.targets, *chunk.proposers)}),
            waiting=[s for s in running if s.first_token_at is None and s not in before],
            drawn=drawn,
        )
        decided = self.settle()
        self._step = queued
        return decided

    def must_settle(self) -> bool:
        """Return whether the host must read the tokens of the passes in flight before it can
        launch a round. This is the case if these tokens finish every running sequence, or if too
        few blocks are free to launch a round without reading them."""
        if self.drawn is None:
            return False
        drawn = set(self.drawn.seqs)
        ends = (s in drawn and len(s.tokens) + 1 >= s.max_tokens for s in self.scheduler.running)
        return all(ends) or self.scheduler.is_short(1)

    def settle(self) -> list[tuple[Sequence, int]]:
        """Wait for the passes in flight, if there are any. Add the time that they took to the
        sequences, and return the tokens that they decided."""
        if (step := self._step) is None:
            return []
        self._step = None
        of_draft = step.halfway.seconds_until(step.end)
        now = time.perf_counter()
        seconds = now - max(step.begun, self.ended_at)
        of_draft = min(of_draft, seconds)
        self.ended_at = now
        for seq in step.seqs:
            seq.prefill_seconds += seconds / len(step.seqs)
        for seq in step.waiting:
            seq.target_prefill_seconds += seconds - of_draft
            seq.draft_prefill_seconds += of_draft
        if step.drawn is None:
            return []
        # `on_host` may be longer than `seqs`. Slicing it would take time while the device is idle.
        return list(zip(step.drawn.seqs, step.drawn.on_host.tolist(), strict=False))

    def _drawn(self, seqs: list[Sequence], found: Results) -> Drawn:
        """Return the next token of each of `seqs`: the tokens that the pass drew itself, or else
        tokens sampled here from its logits. This does not wait for the copy of the tokens to the
        host."""
        if found.tokens is not None and found.told is not None:
            return Drawn(seqs, found.tokens, found.told)
        tokens = self._draw(seqs, found.logits)
        on_host = torch.empty(len(seqs), dtype=torch.int64, pin_memory=tokens.is_cuda)
        return Drawn(seqs, tokens, on_host.copy_(tokens, non_blocking=True).numpy())

    @torch.inference_mode()
    def _draw(self, seqs: list[Sequence], logits: torch.Tensor | None) -> torch.Tensor:
        """Sample the next token of each of `seqs` on rank 0, from logits [R, V]. Every rank gets
        these tokens, int64 [R]."""
        assert logits is not None, "a pass without draws returns its logits"
        device = logits.device
        # Pad rows to a multiple of 16 bytes: for unaligned rows, Triton would compile the kernel
        # again.
        spare = [0] * (len(seqs) % 2)
        rows = [[s.noise_key for s in seqs] + spare, [len(s.tokens) for s in seqs] + spare]
        rows.append([self.params.seed] + [0] * (len(rows[0]) - 1))
        on_host = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        sent = on_host.to(device, non_blocking=True)
        index, length = sent[:2, : len(seqs)]
        tokens = torch.zeros_like(length)
        if self.parallel.is_first:
            tokens = next_tokens(logits, self.params, sent[2, 0], index, length)
        return self.parallel.broadcast(tokens) if self.parallel.size > 1 else tokens

    @property
    def _decides(self) -> bool:
        """True if the prefill pass over a sequence's last token also decides the next token."""
        return self.proposer is None and not self.params.changes_logits

    @property
    def _reads_hidden(self) -> bool:
        """True if the run's proposer reads the target's hidden states."""
        return self.proposer is not None and bool(self.proposer.feature_layers)
