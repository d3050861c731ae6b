"""Padded rounds, launched one ahead of what the host has read.

The device never waits for the host: while it runs a round, the host reads the one before, and
whatever the host changes takes its place in the device's queue behind the round under way. On CUDA
a round is one graph. Knows nothing of scheduling.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specdec_cli.core.history import History
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.state import Slots
from specdec_cli.core.types import Sequence
from specdec_cli.engine.padded import Record, RoundRule, padded_round
from specdec_cli.engine.target import TargetScorer
from specdec_cli.methods.draft_model import DraftWorker

_IN_FLIGHT = 2  # rounds launched and not yet read, at most
_WARM_UP_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round decided, as the host reads it.

    seqs: by slot, as they were when the round was launched; one that has finished since has run a
    ghost round, which means nothing. tokens: K + 1 a slot, of which accepted + 1 count. lens:
    proposal lengths. stage_ms: by stage, on the device's clock. seconds: since the round before, or
    since this one's launch. read_at: the host's clock.
    """

    seqs: list[Sequence]
    tokens: list[list[int]]
    accepted: list[int]
    lens: list[int]
    stage_ms: dict[str, float]
    seconds: float
    read_at: float


@dataclass(frozen=True, slots=True)
class _Flight:
    seqs: list[Sequence]
    record: Record  # on the host
    done: torch.cuda.Event | None
    launched_at: float


class Pipeline:
    """The rounds of one rule over a batch of slots, on this rank of `parallel`.

    pool: the memory of the captured round's own tensors, from `torch.cuda.graph_pool_handle`, or
    None for one of its own. Rounds may share it when no two are ever in flight together, since none
    leaves anything there. history: what n-grams are looked up in; rounds may share it likewise, as
    it is written anew for sequences that come.
    """

    def __init__(
        self,
        target: TargetScorer,
        draft: DraftWorker | None,
        rule: RoundRule,
        batch_size: int,
        num_columns: int,
        parallel: TensorParallel,
        history: History | None = None,
        pool: Any = None,
    ) -> None:
        device = target.model.device
        self.rule = rule
        self.slots = Slots.empty(batch_size, num_columns, device, history)
        self.seqs: list[Sequence] = []
        self._record = Record.empty(batch_size, rule.k, device)
        self._on_host = [
            Record.empty(batch_size, rule.k, torch.device("cpu")) for _ in range(_IN_FLIGHT)
        ]
        self._flights: deque[_Flight] = deque()
        self._num_launched = 0
        self._read_at = 0.0

        def run() -> None:
            with torch.inference_mode():
                padded_round(self.slots, draft, target, rule, self._record, parallel)

        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            for record in self._on_host:
                record.flat = record.flat.pin_memory()
            self._graph = capture(run, device, pool)
            self._run = self._graph.replay

    @property
    def num_slots(self) -> int:
        return len(self.slots.length)

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def load(self, seqs: list[Sequence], seed: int) -> None:
        """Put `seqs` into the slots; no round may be in flight."""
        assert not self._flights, "the device is ahead of the host"
        self.seqs = list(seqs)
        self.slots.load(seqs, seed)

    def grow(self, added: list[tuple[Sequence, list[int]]]) -> None:
        """Enter blocks that were added to the end of sequences' tables."""
        place = {id(seq): slot for slot, seq in enumerate(self.seqs)}
        self.slots.grow([(place[id(s)], len(s.block_table) - len(new), new) for s, new in added])

    def stop(self, seq: Sequence) -> None:
        """Let a sequence's slot fall idle from the next round on."""
        self.slots.stop(next(i for i, s in enumerate(self.seqs) if s is seq))

    def launch(self) -> None:
        """Queue one round; returns at once on CUDA."""
        assert self.in_flight < _IN_FLIGHT
        launched_at = time.perf_counter()
        self._run()
        record = self._on_host[self._num_launched % _IN_FLIGHT]
        record.flat.copy_(self._record.flat, non_blocking=True)
        done = None
        if self.slots.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        self._flights.append(_Flight(self.seqs, record, done, launched_at))
        self._num_launched += 1

    def collect(self) -> Outcome:
        """Read the oldest round in flight, waiting for it where it is still under way."""
        flight = self._flights.popleft()
        if flight.done is not None:
            flight.done.synchronize()
        now = time.perf_counter()
        seconds = now - max(flight.launched_at, self._read_at)
        self._read_at = now
        k = self.rule.k
        rows: list[list[int]] = flight.record.rows.tolist()[: len(flight.seqs)]
        return Outcome(
            seqs=flight.seqs,
            tokens=[row[: k + 1] for row in rows],
            accepted=[row[k + 1] for row in rows],
            lens=[row[k + 2] for row in rows],
            stage_ms=flight.record.stage_ms(),
            seconds=seconds,
            read_at=now,
        )

    def discard(self) -> None:
        """Let what is in flight end, unread."""
        while self._flights:
            flight = self._flights.popleft()
            if flight.done is not None:
                flight.done.synchronize()

    def close(self) -> None:
        """Give up the graph: NCCL does not end while one that holds its sums is alive."""
        self.discard()
        if self._graph is not None:
            self._graph.reset()


def capture(run: Callable[[], None], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """`run` as a CUDA graph. It is run a few times before, which compiles its kernels."""
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
