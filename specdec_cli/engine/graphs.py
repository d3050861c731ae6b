"""Launches the rounds of an engine and reads their results.

Rounds run eagerly, or are captured as CUDA graphs and replayed. On a GPU, the host reads the result
of a round while the next one runs.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from specdec_kernels.compile_ahead import compile_ahead

from specdec_cli.core.kv_cache import BlockAllocator
from specdec_cli.core.state import BatchState, Texts, slot_counts
from specdec_cli.core.types import Sequence
from specdec_cli.engine.round import RoundParts, RoundRecord, run_round
from specdec_cli.launch.rank import num_cores
from specdec_cli.stages import begin_stage

_WARM_UP_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one round, as read by the host.

    seqs: the sequence in each slot at launch. If a sequence has finished since then, the other
        fields are meaningless for its slot.
    tokens: for each slot, k + 1 tokens, of which the first accepted + 1 are valid.
    accepted: the number of accepted proposals in each slot.
    lens: the number of proposals in each slot.
    stage_ms: the milliseconds that each stage of the round took.
    seconds: the time since the previous round was read, or since this round was launched if that
        was later.
    read_at: the time when the host read the result, in seconds on the host's clock.
    distinct_experts: the number of distinct experts that the target's pass read, averaged over the
        layers with experts; None if experts are not counted.
    """

    seqs: list[Sequence]
    k: int
    tokens: list[list[int]]
    accepted: list[int]
    lens: list[int]
    stage_ms: dict[str, float]
    seconds: float
    read_at: float
    distinct_experts: float | None = None


@dataclass(frozen=True, slots=True)
class _Flight:
    seqs: list[Sequence]
    record: RoundRecord
    done: torch.Event | None
    launched_at: float  # seconds on the host's clock


class _Round:
    """A round with proposal length K over the slots of `state`, which can be run many times. `run`
    runs it once and writes the results to `record`."""

    def __init__(
        self, parts: RoundParts, state: BatchState, k: int, is_captured: bool, pool: Any
    ) -> None:
        self.record = RoundRecord.empty(state.num_slots, k, state.device)
        # Each round in flight needs its own record on the host.
        self.on_host = [
            RoundRecord.empty(state.num_slots, k, torch.device("cpu"))
            for _ in range(Rounds.IN_FLIGHT)
        ]
        self.done: list[torch.Event | None] = [None for _ in self.on_host]
        self.graph: torch.cuda.CUDAGraph | None = None

        def run() -> None:
            with torch.inference_mode():
                run_round(parts, state, k, self.record)

        self.run: Callable[[], None] = run
        if state.device.type == "cuda":
            for record in self.on_host:
                record.flat = record.flat.pin_memory()
            self.done = [torch.Event(state.device) for _ in self.on_host]
        if is_captured:
            self.graph = capture(run, state.device, pool)
            self.run = self.graph.replay


class Rounds:
    """This rank's rounds over one batch of slots, for each proposal length K.

    ks: all values of K, in ascending order.
    is_captured: True if rounds run as CUDA graphs.
    runs_ahead: True if the host launches a round before it has read the previous one.
    pool: the memory pool of the CUDA graphs, or None. Two instances may share a pool if their
        rounds are never in flight at the same time.
    """

    IN_FLIGHT = 2  # maximum number of rounds that are launched but not yet read

    def __init__(
        self,
        parts: RoundParts,
        state: BatchState,
        ks: tuple[int, ...],
        is_captured: bool,
        runs_ahead: bool,
        pool: Any = None,
    ) -> None:
        self.parts = parts  # kept, since graphs read its tensors but do not keep them alive
        self.state = state
        self.runs_ahead = runs_ahead
        self.ks = ks
        self.seqs: list[Sequence] = []
        self.last_k = ks[-1]  # K of the round that was launched last
        self._flights: deque[_Flight] = deque()
        self._num_launched = 0
        self._read_at = 0.0
        # Capture the longest round first, so that shorter ones can reuse its memory in the pool.
        self._by_k = {
            k: _Round(parts, state, k, is_captured, pool) for k in sorted(ks, reverse=True)
        }

    @property
    def num_slots(self) -> int:
        return self.state.num_slots

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def load(self, seqs: list[Sequence], seed: int) -> None:
        """Put `seqs` into the slots. No round may be in flight."""
        assert not self._flights, "the device is ahead of the host"
        self.seqs = list(seqs)
        self.state.load(seqs, seed)

    def append(self, seqs: list[Sequence], tokens: torch.Tensor) -> None:
        """Append one token to each of `seqs`, which must be in slots. This changes only the state
        on the device; the host reads the tokens later. tokens: int64 [R] on the device, for R
        sequences."""
        place = self._places()
        self.state.append([place[id(seq)] for seq in seqs], tokens, self.parts.eos_ids)

    def _places(self) -> dict[int, int]:
        """Return the slot of each sequence, keyed by the sequence's `id`."""
        return {id(seq): slot for slot, seq in enumerate(self.seqs)}

    def grow(self, added: list[tuple[Sequence, list[int]]]) -> None:
        """Append new blocks to block tables. added: pairs of a sequence and its new blocks."""
        place = self._places()
        self.state.grow([(place[id(s)], len(s.block_table) - len(new), new) for s, new in added])

    def stop(self, seq: Sequence) -> None:
        """Deactivate a sequence's slot from the next round on."""
        self.state.stop(next(i for i, s in enumerate(self.seqs) if s is seq))

    def launch(self, k: int) -> None:
        """Queue one round. On CUDA this returns at once."""
        assert self.in_flight < self.IN_FLIGHT
        launched_at = time.perf_counter()
        made = self._by_k[k]
        self.last_k = k
        made.run()
        place = self._num_launched % self.IN_FLIGHT
        record, done = made.on_host[place], made.done[place]
        record.flat.copy_(made.record.flat, non_blocking=True)
        if done is not None:
            done.record()
        self._flights.append(_Flight(self.seqs, record, done, launched_at))
        self._num_launched += 1

    def collect(self) -> Outcome:
        """Read the result of the oldest round in flight. Wait if it is still running."""
        flight = self._flights.popleft()
        if flight.done is not None:
            flight.done.synchronize()
        now = time.perf_counter()
        seconds = now - max(flight.launched_at, self._read_at)
        self._read_at = now
        k, experts = flight.record.k, None
        if (mixtures := self.parts.target.mixtures) is not None:
            experts = flight.record.experts_read.item() / mixtures.num_mixtures
        rows: list[list[int]] = flight.record.rows.tolist()[: len(flight.seqs)]
        return Outcome(
            seqs=flight.seqs,
            k=k,
            tokens=[row[: k + 1] for row in rows],
            accepted=[row[k + 1] for row in rows],
            lens=[row[k + 2] for row in rows],
            stage_ms=flight.record.stage_ms(),
            seconds=seconds,
            read_at=now,
            distinct_experts=experts,
        )

    def begin_after(self, time_s: float) -> None:
        """Leave the time before `time_s` out of the next round's `seconds`, because the device was
        busy with other work until then. time_s: seconds on the host's clock."""
        self._read_at = max(self._read_at, time_s)

    def discard(self) -> None:
        """Wait for the rounds in flight to end, without reading them."""
        while self._flights:
            flight = self._flights.popleft()
            if flight.done is not None:
                flight.done.synchronize()

    def close(self) -> None:
        """Wait for the rounds in flight, and free the graphs. Call this before NCCL shuts down: it
        cannot shut down while a graph contains its collectives."""
        self.discard()
        for made in self._by_k.values():
            if made.graph is not None:
                made.graph.reset()


@dataclass(slots=True, eq=False)
class RoundCache:
    """The rounds of one engine at one batch size. They are created when a run first needs them, and
    reused by later runs with the same settings."""

    allocator: BlockAllocator
    batch_size: int
    is_captured: bool
    runs_ahead: bool
    _made: dict[Hashable, tuple[Rounds, ...]] = field(default_factory=dict, init=False)
    _pool: Any = field(default=None, init=False)  # memory pool shared by captured rounds
    _texts: Texts | None = field(default=None, init=False)  # shared by all rounds that read texts

    def of(self, parts: RoundParts, k: int) -> tuple[Rounds, ...]:
        """Return rounds that propose up to k tokens: one `Rounds` for each number of slots, in
        ascending order."""
        params = parts.params
        key = (k, parts.rule, parts.policy, *params.filters, params.ignore_eos, params.processing)
        if key not in self._made:
            self._made[key] = self._make(parts, k)
        return self._made[key]

    def close(self) -> None:
        """Free the captured rounds and the memory that they hold."""
        for made in self._made.values():
            for rounds in made:
                rounds.close()
        self._made.clear()
        self._pool = self._texts = None

    def _make(self, parts: RoundParts, k: int) -> tuple[Rounds, ...]:
        # A pass may write up to `ahead` positions past the end of the longest sequence. A pass that
        # also feeds tokens missing from its cache is padded by up to k more positions. Block tables
        # need columns for all these positions. Columns without an allocated block contain block 0,
        # where writes do no harm.
        ahead = max(k, parts.proposer.ahead(k)) if parts.proposer is not None else k
        held = min(self.allocator.blocks_for(parts.max_model_len), self.allocator.num_usable)
        columns = held + self.allocator.blocks_for(ahead + k + 1)
        device = parts.target.device
        if self.is_captured and self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        texts = None
        how = parts.processors
        marks = how is not None and how.reads_text
        if marks or (k and parts.proposer is not None and parts.proposer.needs_text):
            longest = min(parts.max_model_len, held * self.allocator.block_size)
            texts = self._texts or Texts.empty(self.batch_size, longest + 1, device)
            self._texts = texts
            if how is not None and marks:
                texts.mark(len(how.suppressed))
        ks = parts.policy.lengths(k) if k else (0,)
        # Capture the largest batch first, so that smaller ones can reuse its memory in the pool.
        counts = reversed(slot_counts(self.batch_size))
        tail = parts.proposer.tail_for(k) if parts.proposer is not None else 2
        states = [BatchState(count, columns, device, texts, tail) for count in counts]
        if self.is_captured:
            begin_stage("compiling the kernels of rounds")
            compile_ahead(partial(_run_each, parts, states, ks), device, num_cores())
            begin_stage("capturing rounds")
        made = [
            Rounds(parts, state, ks, self.is_captured, self.runs_ahead, self._pool)
            for state in states
        ]
        return tuple(reversed(made))


@torch.inference_mode()
def _run_each(parts: RoundParts, states: list[BatchState], ks: tuple[int, ...]) -> None:
    """Run one round with every K in `ks` over each of `states`."""
    for state in states:
        for k in ks:
            run_round(parts, state, k, RoundRecord.empty(state.num_slots, k, state.device))


def capture(run: Callable[[], None], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """Capture `run` as a CUDA graph, after a few ordinary calls that compile its kernels."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_ROUNDS):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        run()
    return graph
