"""The engine's main loop. It decides when prefill passes and rounds run, and when the host reads
their results.

All ranks run the same rounds on the same sequences. Rank 0 proposes and decides.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field

import torch
from specdec_kernels.compile_ahead import compile_ahead

from specdec_cli.acceptance.base import AcceptanceRule, NoForecast
from specdec_cli.acceptance.rejection import Rejection
from specdec_cli.core.figures import Metrics, summarise
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.kv_cache import BlockAllocator
from specdec_cli.core.logits_processors import LogitsProcessors
from specdec_cli.core.parallel import ALONE, HostMessages, TensorParallel
from specdec_cli.core.types import Arrivals, Emission, Request, SamplingParams, Sequence
from specdec_cli.engine.graphs import RoundCache
from specdec_cli.engine.prefill import Moments, Prefill
from specdec_cli.engine.round import RoundParts
from specdec_cli.engine.run import Run, check_finite
from specdec_cli.engine.scheduler import Scheduler
from specdec_cli.errors import RunError, UsageError
from specdec_cli.launch.rank import num_cores
from specdec_cli.lengths.base import LengthPolicy
from specdec_cli.lengths.costs import RoundCosts
from specdec_cli.lengths.fixed import FixedLength
from specdec_cli.methods.base import Proposer
from specdec_cli.methods.forecast import forecast
from specdec_cli.methods.teacher import Teacher, last_logits
from specdec_cli.models.paged import PagedModel
from specdec_cli.models.prompt_passes import PromptGraphs
from specdec_cli.stages import begin_stage

_LONGEST_SLEEP_S = 0.2  # seconds; an idle engine gives a heartbeat at least this often


@dataclass(frozen=True, slots=True)
class RunResult:
    """All sequences of a run, in the order in which its requests were given, and its metrics."""

    seqs: list[Sequence]
    metrics: Metrics


@dataclass(kw_only=True, eq=False)
class Engine:
    """Runs sequences on a target and a proposer, with one block allocator for both caches. The
    state of a run is in `Run`, not here.

    Engines may share a target and its cache if only one of them runs at a time.

    proposer: proposes tokens; None if every token is decoded by the target alone.
    max_model_len: the maximum number of tokens of a sequence.
    prefill_chunk: the maximum number of tokens of one prefill pass.
    eos_ids: the token ids that end a sequence.
    rule: the acceptance rule, which decides which proposals to keep.
    policy: the length policy, which chooses how many tokens to propose.
    is_captured, runs_ahead: as in `Rounds`.
    parallel: the ranks over which the target is split.
    prompts: the CUDA graphs of prefill passes; None if these passes are not captured.
    hidden_layers: the layers whose hidden states this engine's proposer reads from a target that
        several engines share; None if the target is not shared.
    max_k: the largest proposal length of a run; None without a limit.
    """

    target: PagedModel
    proposer: Proposer | None
    allocator: BlockAllocator
    batch_size: int
    max_model_len: int
    prefill_chunk: int
    eos_ids: frozenset[int]
    rule: AcceptanceRule = field(default_factory=Rejection)
    policy: LengthPolicy = field(default_factory=FixedLength)
    is_captured: bool = False
    runs_ahead: bool = False
    parallel: TensorParallel = ALONE
    prompts: PromptGraphs | None = None
    hidden_layers: tuple[int, ...] | None = None
    max_k: int | None = None

    def __post_init__(self) -> None:
        self.costs = RoundCosts(self.parallel)
        self._arrivals = HostMessages(self.parallel)
        self._moments = Moments(self.target.device)
        self._rounds = self._new_rounds()

    def _new_rounds(self) -> RoundCache:
        return RoundCache(self.allocator, self.batch_size, self.is_captured, self.runs_ahead)

    def with_batch_size(self, batch_size: int) -> "Engine":
        """Return an engine with the same models, caches and allocator, but a different number of
        slots."""
        if batch_size == self.batch_size:
            return self
        other = copy(self)
        other.batch_size = batch_size
        other._rounds = other._new_rounds()
        return other

    def forget_rounds(self) -> None:
        """Free the CUDA graphs of rounds and of prefill passes, and their memory."""
        self._rounds.close()
        if self.prompts is not None:
            self.prompts.close()

    def run(
        self,
        requests: Iterable[Request],
        k: int,
        params: SamplingParams,
        on_emit: Callable[[list[Emission]], None] | None = None,
        arrivals: Arrivals | None = None,
    ) -> RunResult:
        """Decode every request with proposal length `k`; 0 is plain autoregressive decoding.

        on_emit: called with new tokens as soon as the host has read them. As long as more requests
            will arrive, it is called after every step as a heartbeat, even without new tokens.
        arrivals: more requests, in order of arrival; None if there are none. The engine takes a
            request from `arrivals` only when the one before it is due.

        A request that cannot run ends with finish_reason "error" at once, and `on_emit` gets an
        emission without tokens for it. Raises `RunError` if logits are not finite.
        """
        run = self.start(requests, k, params)
        if arrivals is not None:
            run.to_come = iter(arrivals)
            run.look_ahead(0)
        emissions: list[Emission] = []
        try:
            while True:
                emissions += [Emission(seq, [], 0) for seq in run.refused]
                run.refused.clear()
                if on_emit is not None and (emissions or run.scheduler.pending):
                    on_emit(emissions)
                if run.scheduler.is_done or (arrivals is not None and arrivals.is_over):
                    break
                emissions = self.step(run)
        except RunError:
            self._clear_caches()
            raise
        finally:
            run.rounds.discard()
            run.scheduler.release_all()
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        if self.proposer is not None:
            self.proposer.check()
        self.rule.check()
        self.policy.check()
        return RunResult(run.seqs, summarise(run.seqs, k, self.batch_size))

    def compile_ahead(self, lengths: Iterable[int], k: int, params: SamplingParams) -> None:
        """Capture or compile the rounds for `k` and `params`, and compile the kernels for prompts
        of these lengths, so that a run need not wait for either."""
        self.start([], k, params)

        def fill_each() -> None:
            for length in lengths:
                run = self.start([Request(0, (0,) * length)], k, params)
                if not run.scheduler.is_done:
                    self.step(run)
                run.rounds.discard()
                run.scheduler.release_all()

        begin_stage("compiling the kernels of prompts")
        compile_ahead(fill_each, self.target.device, num_cores())

    def forecast(
        self, request: Request, output: list[int], k: int, params: SamplingParams
    ) -> Forecast:
        """Return the expected acceptance of rounds that start at each token of `output`, a finished
        answer to `request`. Nothing is decoded.

        k: the maximum number of tokens that a round may propose. The engine must be idle. All ranks
        must call this, but only rank 0's result is valid. Raises `NoForecast` if the acceptance
        rule or the length policy does not support forecasts.
        """
        assert self.proposer is not None, "proposing needs a proposer"
        if not self.policy.is_fixed:
            raise NoForecast
        prompt = request.token_ids
        found = self.rule.forecast(request.index, len(prompt), len(output), k, params)
        if found is not None:
            return found
        self.proposer.begin()
        return forecast(self.proposer.up_to(k), self._teacher(params), prompt, output, k, params)

    def logits_after(
        self, tokens: list[int], width: int, start: int, params: SamplingParams
    ) -> torch.Tensor:
        """Return the target's logits, fp32 [V], after `tokens`, with the logits processing that
        `params` asks for.

        width: the number of tokens that the last pass feeds; earlier tokens are prefilled. start:
        the number of prompt tokens. As for `forecast`, the engine must be idle, all ranks must call
        this, and only rank 0's result is valid.
        """
        return last_logits(self._teacher(params), tokens, width, start)

    def _teacher(self, params: SamplingParams) -> Teacher:
        self._take_target()
        where = self.target, self.allocator, self.prefill_chunk, self.parallel
        return Teacher(*where, self._processors(params))

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        """Return the token ids that end a sequence."""
        return frozenset() if params.ignore_eos else self.eos_ids

    def _processors(self, params: SamplingParams) -> LogitsProcessors | None:
        return LogitsProcessors.of(
            params, self._ends(params), self.target.vocab_size, self.target.device
        )

    def start(self, requests: Iterable[Request], k: int, params: SamplingParams) -> Run:
        """Begin a run: queue `requests` and return the state that `step` advances. Raises
        `UsageError` for a `k` that is negative or above `max_k`, and for no new tokens."""
        most = 0 if self.proposer is None else self.max_k
        if params.max_new_tokens < 1:
            told = f"max_new_tokens is {params.max_new_tokens}, but it must be 1 or more"
            raise UsageError(told)
        if k < 0:
            raise UsageError(f"k is {k}, but it must not be negative", "0 is plain decoding")
        if most is not None and k > most:
            raise UsageError(
                f"k is {k}, but this engine was built for k up to {most}",
                "build it with a larger speculation.num_speculative_tokens",
            )
        self._take_target()
        if self.proposer is not None:
            self.proposer.begin()
        # Do no work for proposals that the run never makes. At k = 0, there is no proposer at all.
        proposer = self.proposer.up_to(k) if k and self.proposer is not None else None
        draft_max_len = proposer.max_len if proposer is not None else 0
        ahead = proposer.ahead(k) if proposer is not None else 0
        scheduler = Scheduler(self.allocator, self.batch_size, k, draft_max_len, ahead)
        by_slots = self._rounds.of(self._parts(proposer, params), k)
        prefill = Prefill(
            self.target,
            proposer,
            params,
            scheduler,
            self.prefill_chunk,
            self.parallel,
            self._moments,
        )
        run = Run(
            *(k, params, self.max_model_len, self.target.vocab_size, self._ends(params)),
            *(scheduler, prefill, by_slots, by_slots[-1], time.perf_counter()),
        )
        for request in requests:
            run.add(request, is_here=request.arrives_at <= 0.0)
        scheduler.pending = deque(sorted(scheduler.pending, key=lambda seq: seq.arrived_at))
        return run

    def _take_target(self) -> None:
        """Make a shared target return the hidden states that this engine's proposer reads."""
        layers = self.hidden_layers
        if layers is not None and layers != self.target.hidden_layers:
            self.target.hidden_layers = layers

    def _parts(self, proposer: Proposer | None, params: SamplingParams) -> RoundParts:
        eos_ids, device = sorted(self._ends(params)), self.target.device
        ends = torch.tensor(eos_ids, dtype=torch.int64, device=device)
        return RoundParts(
            target=self.target,
            proposer=proposer,
            rule=self.rule,
            policy=self.policy,
            params=params,
            max_model_len=self.max_model_len,
            eos_ids=ends,
            parallel=self.parallel,
            processors=self._processors(params),
        )

    def step(self, run: Run) -> list[Emission]:
        """Advance the run by one step. Return the tokens that the host has read in this step.

        A step launches a round, or launches the prefill passes over a chunk of prompt tokens, or
        only reads results.
        """
        if run.scheduler.pending and not self._has_work(run):
            return []
        began = time.perf_counter()
        if self._must_settle(run):
            return self._read_last(run)
        run.admit(began)
        if not run.rounds.in_flight and (emissions := self._fill(run, began)) is not None:
            return emissions
        stays_ahead = self._launch(run)
        # Read prefill results after the launch, so that the host queues the round during prefill.
        emissions = self._read_prefill(run)
        return emissions if stays_ahead else emissions + self._read_last(run)

    def _has_work(self, run: Run) -> bool:
        """Queue the requests that are due by rank 0's clock, and return whether there is work. If
        the engine is idle, first sleep until the next request is due, but at most
        `_LONGEST_SLEEP_S`."""
        scheduler, count = run.scheduler, 0
        if self.parallel.is_first:
            if scheduler.is_idle and not run.rounds.in_flight:
                left = scheduler.pending[0].arrived_at - time.perf_counter()
                time.sleep(min(max(left, 0.0), _LONGEST_SLEEP_S))
            now = time.perf_counter()
            while run.look_ahead(count) and scheduler.pending[count].arrived_at <= now:
                count += 1
        count = self._arrivals.told(count)
        run.look_ahead(count)  # on other ranks, take the same requests as rank 0
        scheduler.arrive(count)
        return not scheduler.is_idle or run.rounds.in_flight > 0

    def _fill(self, run: Run, began: float) -> list[Emission] | None:
        """Queue the prefill passes over the next chunk of tokens that are missing from the caches.
        If no tokens are missing, read the results of the last chunk, but only if the next round
        depends on them.

        Return the tokens that were read, or None if nothing was done and a round can start.
        """
        if (chunk := run.prefill.next_chunk()) is not None:
            emissions = run.take(run.prefill.feed(chunk, began))
            return emissions if self.runs_ahead else emissions + self._read_prefill(run)
        return self._read_prefill(run) if run.prefill.must_settle() else None

    def _launch(self, run: Run) -> bool:
        """Queue a round. Return whether it should still be in flight when this step ends."""
        is_first = not run.rounds.in_flight
        if is_first:
            run.load()
        else:
            run.rounds.grow(run.scheduler.extend_ahead(run.k + 1))
        run.rounds.launch(self._next_k(run))
        return is_first and run.rounds.runs_ahead

    def _next_k(self, run: Run) -> int:
        ks = run.rounds.ks
        if len(ks) == 1:
            return ks[0]
        return self.policy.next_k(ks, run.last, self.costs, run.rounds.num_slots)

    def _must_settle(self, run: Run) -> bool:
        """Return whether the host must read the round in flight before it queues another one.

        This is the case if sequences can be admitted or must be preempted, if rounds with fewer
        slots are enough for the running sequences, or if all sequences may have ended. It is also
        the case if the next round proposes tokens and the last did not, because the proposer's
        cache may then lack tokens.
        """
        if not run.rounds.in_flight:
            return False
        scheduler = run.scheduler
        return (
            scheduler.can_admit()
            or run.rounds_for(len(scheduler.running)) is not run.rounds
            or all(len(s.tokens) + 1 >= s.max_tokens for s in scheduler.running)
            or scheduler.is_short(run.k + 1)
            or (run.rounds.last_k == 0 and self._next_k(run) > 0)  # draft cache may lack tokens
        )

    def _read_last(self, run: Run) -> list[Emission]:
        """Read the oldest round in flight, and append its tokens to the sequences that have not
        finished since its launch."""
        done = run.rounds.collect()
        live = [b for b, seq in enumerate(done.seqs) if seq.finish_reason is None]
        if not live:
            return []
        check_finite([done.accepted[b] for b in live])
        self.costs.add(run.rounds.num_slots, done.k, done.seconds)
        return run.apply(done, live)

    def _read_prefill(self, run: Run) -> list[Emission]:
        return run.take(run.prefill.settle())

    def _clear_caches(self) -> None:
        """Fill the caches with zeros after logits were not finite. A NaN left in a cache would
        spread even from positions that attention masks out, because 0 * NaN is NaN."""
        self.target.cache.clear()
        if self.proposer is not None:
            self.proposer.clear()
