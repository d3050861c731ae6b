"""The engine: rounds of propose, score, verify and apply over a changing set of sequences.

The only module that changes a sequence. Knows no text; stop strings are found by an object that
is handed in. With several ranks each runs the same rounds on the same sequences: what is proposed
and what is decided is rank 0's, and everything else follows from it.
"""

import time
from collections.abc import Callable, Iterable
from copy import copy

import torch

from specdec_cli.acceptance.rejection import check_finite, read_verdict, verify
from specdec_cli.acceptance.synthetic import SyntheticAcceptance
from specdec_cli.core.batch import Span
from specdec_cli.core.kv_cache import BlockAllocator
from specdec_cli.core.parallel import ALONE, TensorParallel
from specdec_cli.core.sampling import round_noise
from specdec_cli.core.types import (
    Proposal,
    RoundNoise,
    SamplingParams,
    Scores,
    Sequence,
    Verdict,
)
from specdec_cli.engine.metrics import RunClock, summarise
from specdec_cli.engine.pipeline import Pipeline
from specdec_cli.engine.rounds import PaddedRounds
from specdec_cli.engine.run import Emission, Proposer, Request, Run, RunResult
from specdec_cli.engine.scheduler import Scheduler
from specdec_cli.engine.target import TargetScorer
from specdec_cli.errors import RunError
from specdec_cli.methods.draft_model import DraftWorker, no_proposal


class Engine:
    """Two models, their caches and one allocator; holds no state of a run.

    eos_ids: ids that end a sequence. max_model_len: most tokens a sequence may hold.
    prefill_chunk: most tokens of one prefill pass. synthetic: accept by given rates instead of by
    rejection sampling; the output is then not the target's. pipelined: run padded rounds, launched
    one ahead of the host (as graphs on CUDA). parallel: the ranks that the target is split over.
    """

    def __init__(
        self,
        target: TargetScorer,
        draft: Proposer | None,
        allocator: BlockAllocator,
        *,
        batch_size: int,
        max_model_len: int,
        prefill_chunk: int,
        eos_ids: frozenset[int],
        synthetic: SyntheticAcceptance | None = None,
        pipelined: bool = False,
        parallel: TensorParallel = ALONE,
    ) -> None:
        self.target = target
        self.draft = draft
        self.allocator = allocator
        self.batch_size = batch_size
        self.max_model_len = max_model_len
        self.prefill_chunk = prefill_chunk
        self.eos_ids = eos_ids
        self.synthetic = synthetic
        self.pipelined = pipelined
        self.parallel = parallel
        self._rounds = self._padded_rounds()

    def with_batch_size(self, batch_size: int) -> "Engine":
        """The same models, caches and allocator with another number of slots."""
        if batch_size == self.batch_size:
            return self
        other = copy(self)
        other.batch_size = batch_size
        other._rounds = other._padded_rounds()
        return other

    def forget_rounds(self) -> None:
        """Give up the rounds that were captured, and the memory that they hold."""
        self._rounds.close()

    def _padded_rounds(self) -> PaddedRounds:
        return PaddedRounds(
            self.target,
            self.draft,
            self.allocator,
            batch_size=self.batch_size,
            max_model_len=self.max_model_len,
            eos_ids=self.eos_ids,
            synthetic=self.synthetic,
            parallel=self.parallel,
        )

    def run(
        self,
        requests: Iterable[Request],
        k: int,
        params: SamplingParams,
        on_emit: Callable[[list[Emission]], None] | None = None,
    ) -> RunResult:
        """Decode every request with proposal length `k`; 0 is plain autoregressive decoding.

        A request that cannot run ends with finish_reason "error" and the others go on. `on_emit`
        is called with those at once, and after each round with what the round wrote.
        """
        run = self.start(requests, k, params)
        refused = [Emission(s, [], 0) for s in run.seqs if s.finish_reason is not None]
        if refused and on_emit is not None:
            on_emit(refused)
        try:
            while not run.scheduler.is_done:
                emissions = self.step(run)
                if emissions and on_emit is not None:
                    on_emit(emissions)
        except RunError:
            self._clear_caches()
            raise
        finally:
            if run.pipeline is not None:
                run.pipeline.discard()
            run.scheduler.release_all()
        run.clock.finish()
        return RunResult(run.seqs, summarise(run.seqs, run.clock, k, self.batch_size))

    def start(self, requests: Iterable[Request], k: int, params: SamplingParams) -> Run:
        """Queue `requests` for `step`."""
        assert k == 0 or self.draft is not None, "proposing needs a proposer"
        draft_max_len = self.draft.max_len if self.draft is not None else 0
        scheduler = Scheduler(self.allocator, self.batch_size, k, draft_max_len)
        run = Run(k, params, scheduler, RunClock(self.target.model.device))
        for request in requests:
            self._add(run, request)
        if self.pipelined and run.seqs:
            run.pipelines = self._rounds.of(k, params)
            run.pipeline = run.pipelines[-1]
        return run

    @staticmethod
    def _pipeline_for(run: Run, count: int) -> Pipeline:
        """The smallest that has a slot for each of `count` sequences."""
        return next(p for p in run.pipelines if p.num_slots >= count)

    def step(self, run: Run) -> list[Emission]:
        """Advance by one round, or fill the caches of newly admitted sequences."""
        started = time.perf_counter()
        if self._must_settle(run):
            return self._collect(run)
        for seq in run.scheduler.admit():
            seq.admitted_at = seq.admitted_at or started
        if prefilling := [s for s in run.scheduler.running if s.needs_prefill]:
            self._prefill(run, prefilling, started)
            return []
        if run.pipeline is not None:
            return self._step_ahead(run)
        seqs, lens = run.scheduler.reserve()
        noise = self._noise(run, seqs, max(lens))
        with run.clock.stage("draft"):
            proposal = self._propose(run, seqs, lens, noise)
        with run.clock.stage("broadcast"):
            self.parallel.broadcast(proposal.token_ids)
        with run.clock.stage("verify"):
            scores = self.target.score(seqs, proposal, run.params)
        with run.clock.stage("sample"):
            decided = self._decide(proposal, scores, noise)
        with run.clock.stage("broadcast"):
            self.parallel.broadcast(decided)
        verdict = read_verdict(decided)
        # A proposer may propose less than it was asked for, but never more.
        now = time.perf_counter()
        return self._apply(run, seqs, proposal.lens, verdict, now - started, now)

    def _step_ahead(self, run: Run) -> list[Emission]:
        """Launch a round; then apply the one before it, if there is one in flight."""
        assert run.pipeline is not None
        if not run.pipeline.in_flight:
            seqs, _ = run.scheduler.reserve()
            run.pipeline = self._pipeline_for(run, len(seqs))
            run.pipeline.load(seqs, run.params.seed)
            run.pipeline.launch()
            return []
        run.pipeline.grow(run.scheduler.extend_ahead(run.k + 1))
        run.pipeline.launch()
        return self._collect(run)

    def _must_settle(self, run: Run) -> bool:
        """Whether the round in flight has to be applied before anything else is done.

        So it is when sequences are to come or to be preempted, for which the host has to know
        where all of them stand, when fewer slots would do for those that are left, and when another
        round would find every sequence finished.
        """
        if run.pipeline is None or not run.pipeline.in_flight:
            return False
        scheduler = run.scheduler
        return (
            scheduler.can_admit()
            or self._pipeline_for(run, len(scheduler.running)) is not run.pipeline
            or all(len(s.tokens) + 1 >= s.max_tokens for s in scheduler.running)
            or scheduler.is_short(run.k + 1)
        )

    def _collect(self, run: Run) -> list[Emission]:
        """Apply the oldest round in flight; what finished sequences did in it does not count."""
        assert run.pipeline is not None
        done = run.pipeline.collect()
        live = [b for b, seq in enumerate(done.seqs) if seq.finish_reason is None]
        if not live:
            return []
        accepted = [done.accepted[b] for b in live]
        check_finite(accepted)
        verdict = Verdict([done.tokens[b][: done.accepted[b] + 1] for b in live], accepted)
        run.clock.add_stages(done.stage_ms)
        seqs, lens = [done.seqs[b] for b in live], [done.lens[b] for b in live]
        return self._apply(run, seqs, lens, verdict, done.seconds, done.read_at)

    def _clear_caches(self) -> None:
        """Forget keys and values that are not finite: padding reads them, and 0 * NaN is NaN."""
        for worker in (self.target, self.draft):
            if isinstance(worker, TargetScorer | DraftWorker):
                worker.model.cache.clear()

    def _prefill(self, run: Run, seqs: list[Sequence], started: float) -> None:
        """Feed both models one chunk of what lies before the last token of `seqs`.

        The last token is left to the first round, which so proposes from the very first output
        token on, as transformers' assisted generation does.
        """
        budget = self.prefill_chunk
        spans: list[Span] = []
        for seq in seqs:
            length = min(budget, len(seq.tokens) - 1 - seq.target_kv)
            if length > 0:
                spans.append(Span(seq, seq.target_kv, seq.target_kv + length))
                budget -= length
        self.target.prefill(spans)
        draft_spans = [s for s in spans if run.scheduler.proposal_len(s.seq) > 0]
        if draft_spans and self.draft is not None:
            self.draft.prefill(draft_spans)
        for span in spans:
            span.seq.target_kv = span.stop
        for span in draft_spans:
            span.seq.draft_kv = span.stop
        if self.target.model.device.type == "cuda":
            # Not inside a round: the pass's own time is wanted, not that of queueing it.
            torch.cuda.synchronize(self.target.model.device)
        seconds = time.perf_counter() - started
        run.clock.prefill_seconds += seconds
        for span in spans:
            span.seq.prefill_seconds += seconds / len(spans)

    def _noise(self, run: Run, seqs: list[Sequence], k: int) -> RoundNoise:
        return round_noise(
            [s.index for s in seqs],
            [len(s.tokens) for s in seqs],
            k,
            run.params,
            self.target.model.device,
            even_greedy=self.synthetic is not None,
        )

    def _propose(
        self, run: Run, seqs: list[Sequence], lens: list[int], noise: RoundNoise
    ) -> Proposal:
        if self.draft is None or max(lens) == 0:
            model = self.target.model
            return no_proposal(len(seqs), model.vocab_size, model.device)
        return self.draft.propose(seqs, lens, noise, run.params)

    def _decide(self, proposal: Proposal, scores: Scores, noise: RoundNoise) -> torch.Tensor:
        """The round's decision, see `engine.verify.decision`; room for it on ranks other than 0."""
        batch, k = proposal.token_ids.shape
        if not self.parallel.is_first:
            return proposal.token_ids.new_zeros(batch, k + 2)
        decide = verify if self.synthetic is None else self.synthetic.verify
        return decide(proposal, scores, noise.first(k))

    def _apply(
        self,
        run: Run,
        seqs: list[Sequence],
        lens: list[int],
        verdict: Verdict,
        seconds: float,
        now: float,
    ) -> list[Emission]:
        """Append what was decided, move both cache lengths, finish or trim each sequence.

        seconds: the round's time. now: when it ended, on the host's clock.
        """
        run.clock.add_round(seconds)
        stage_ms = run.clock.take_stages()
        emissions = []
        for seq, k, tokens, accepted in zip(
            seqs, lens, verdict.tokens, verdict.accepted, strict=True
        ):
            n = len(seq.tokens)
            seq.target_kv = n + accepted
            if k:
                seq.draft_kv = n + min(accepted, k - 1)
            keep = self._finish_reason(run, seq, tokens)
            seq.tokens.extend(tokens[:keep])
            kept = min(accepted, keep)
            if k:
                seq.proposed_per_round.append(k)
                seq.accepted_per_round.append(kept)
            else:
                seq.rounds_without_proposal += 1
            seq.decode_seconds += seconds / len(seqs)
            seq.round_share += 1 / len(seqs)
            for stage, spent in stage_ms.items():
                seq.stage_ms[stage] = seq.stage_ms.get(stage, 0.0) + spent / len(seqs)
            seq.first_token_at = seq.first_token_at or now
            emissions.append(Emission(seq, tokens[:keep], kept))
            if seq.finish_reason is not None:
                seq.finished_at = now
                run.scheduler.finish(seq)
                if seq.finish_reason == "stop" and run.pipeline is not None:
                    # Only the host sees stop strings; its blocks may go to others now.
                    run.pipeline.stop(seq)
            elif run.pipeline is None:
                run.scheduler.trim(seq)
        return emissions

    def _finish_reason(self, run: Run, seq: Sequence, tokens: list[int]) -> int:
        """Decide whether `tokens` end the sequence; returns how many of them to keep."""
        keep = len(tokens)
        if not run.params.ignore_eos:
            for count, token in enumerate(tokens, start=1):
                if token in self.eos_ids:
                    keep, seq.finish_reason = count, "eos"
                    break
        finder = run.stop_finders.get(seq.index)
        if finder is not None and (found := finder.feed(tokens[:keep])) is not None:
            keep, seq.finish_reason = found, "stop"
        if seq.finish_reason is None and len(seq.tokens) + keep >= seq.max_tokens:
            seq.finish_reason = "length"
        return keep

    def _add(self, run: Run, request: Request) -> None:
        length = len(request.token_ids)
        seq = Sequence(
            index=request.index,
            tokens=list(request.token_ids),
            num_prompt_tokens=length,
            max_tokens=min(length + run.params.max_new_tokens, self.max_model_len),
        )
        run.seqs.append(seq)
        try:
            if length == 0:
                raise ValueError("the prompt has no tokens")
            if length >= self.max_model_len:
                raise ValueError(
                    f"the prompt has {length} tokens; with at least one new token it exceeds "
                    f"the model length of {self.max_model_len}"
                )
            run.scheduler.add(seq)
        except ValueError as problem:
            seq.finish_reason, seq.error = "error", str(problem)
            return
        if request.stop_finder is not None:
            run.stop_finders[request.index] = request.stop_finder()
