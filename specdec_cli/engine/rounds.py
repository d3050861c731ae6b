"""A cache of an engine's rounds, by the run's settings and by number of slots. Rounds are made when
they are first asked for."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from specdec_kernels.compile_ahead import compile_ahead

from specdec_cli.core.kv_cache import BlockAllocator
from specdec_cli.core.state import BatchState, Texts, slot_counts
from specdec_cli.engine.graphs import Rounds
from specdec_cli.engine.round import Record, RoundParts, run_round
from specdec_cli.stages import begin_stage


@dataclass(slots=True, eq=False)
class RoundCache:
    """Rounds over the models and caches of one engine, at one batch size.

    is_captured, runs_ahead: see `graphs.Rounds`.
    """

    allocator: BlockAllocator
    batch_size: int
    is_captured: bool
    runs_ahead: bool
    _made: dict[Hashable, tuple[Rounds, ...]] = field(default_factory=dict, init=False)
    _pool: Any = field(default=None, init=False)  # memory that captured rounds share
    _texts: Texts | None = field(default=None, init=False)  # likewise

    def of(self, parts: RoundParts, k: int) -> tuple[Rounds, ...]:
        """The rounds whose longest proposal has k tokens, by number of slots, rising."""
        params = parts.params
        key = (k, parts.rule, parts.policy, *params.filters, params.ignore_eos)
        if key not in self._made:
            self._made[key] = self._make(parts, k)
        return self._made[key]

    def close(self) -> None:
        """Give up the captured rounds and the memory that they hold."""
        for made in self._made.values():
            for rounds in made:
                rounds.close()
        self._made.clear()
        self._pool = self._texts = None

    def _make(self, parts: RoundParts, k: int) -> tuple[Rounds, ...]:
        # Padding reaches up to k tokens past the longest sequence; its columns hold block 0.
        held = min(self.allocator.blocks_for(parts.max_model_len), self.allocator.num_usable)
        columns = held + self.allocator.blocks_for(k + 1)
        device = parts.target.device
        if self.is_captured and self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        texts = None
        if k and parts.proposer is not None and parts.proposer.needs_text:
            longest = min(parts.max_model_len, held * self.allocator.block_size)
            texts = self._texts or Texts.empty(self.batch_size, longest + 1, device)
            self._texts = texts
        lengths = parts.policy.lengths(k) if k else (0,)
        # The largest first: the smaller ones then fit into the memory it reserved.
        counts = reversed(slot_counts(self.batch_size))
        tail = parts.proposer.tail if parts.proposer is not None else 2
        states = [BatchState(count, columns, device, texts, tail) for count in counts]
        if self.is_captured:
            begin_stage("compiling the kernels of rounds")
            compile_ahead(partial(_run_each, parts, states, lengths), device)
            begin_stage("capturing rounds")
        made = [
            Rounds(parts, state, lengths, self.is_captured, self.runs_ahead, self._pool)
            for state in states
        ]
        return tuple(reversed(made))


@torch.inference_mode()
def _run_each(parts: RoundParts, states: list[BatchState], lengths: tuple[int, ...]) -> None:
    """Run a round of every K over each of `states`."""
    for state in states:
        for k in lengths:
            run_round(parts, state, k, Record.empty(state.num_slots, k, state.device))
