"""The padded rounds of an engine: one pipeline for each rule and number of slots, captured once."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec_cli.acceptance.synthetic import SyntheticAcceptance
from specdec_cli.core.history import History
from specdec_cli.core.kv_cache import BlockAllocator
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.types import SamplingParams
from specdec_cli.engine.padded import RoundRule
from specdec_cli.engine.pipeline import Pipeline
from specdec_cli.engine.run import Proposer
from specdec_cli.engine.target import TargetScorer
from specdec_cli.methods.draft_model import DraftWorker
from specdec_cli.methods.ngram import NgramProposer


def slot_counts(batch_size: int) -> list[int]:
    """The numbers of slots that rounds are captured for, so that the end of a run, when few
    sequences are left, costs about what they cost: a quarter each of the next, as more would be
    slow to compile."""
    counts = [batch_size]
    while counts[0] > 1:
        counts.insert(0, -(-counts[0] // 4))
    return counts


@dataclass(slots=True, eq=False)
class PaddedRounds:
    """Rounds over the models and caches of one engine, at one batch size.

    draft: a model or n-grams, or None for rounds without proposals. max_model_len: most tokens a
    sequence may hold. eos_ids: ids that end a sequence. synthetic: accept by given rates.
    """

    target: TargetScorer
    draft: Proposer | None
    allocator: BlockAllocator
    batch_size: int
    max_model_len: int
    eos_ids: frozenset[int]
    synthetic: SyntheticAcceptance | None
    parallel: TensorParallel
    _made: dict[Hashable, tuple[Pipeline, ...]] = field(default_factory=dict, init=False)
    _pool: Any = field(default=None, init=False)  # memory that captured rounds share
    _history: History | None = field(default=None, init=False)  # likewise, where it is looked up

    def of(self, k: int, params: SamplingParams) -> tuple[Pipeline, ...]:
        """Those of proposal length `k`, by number of slots; captured when first asked for."""
        key = (k, params.temperature, params.top_k, params.top_p, params.ignore_eos)
        if key not in self._made:
            self._made[key] = self._make(self._rule(k, params))
        return self._made[key]

    def close(self) -> None:
        """Give up the rounds that were captured, and the memory that they hold."""
        for pipelines in self._made.values():
            for pipeline in pipelines:
                pipeline.close()
        self._made.clear()
        self._pool = self._history = None

    def _rule(self, k: int, params: SamplingParams) -> RoundRule:
        device = self.target.model.device
        rates = None
        if self.synthetic is not None and k:
            rates = torch.tensor(self.synthetic.rates(k), device=device)
        eos_ids = [] if params.ignore_eos else sorted(self.eos_ids)
        draft_max_len = self.draft.max_len if k and self.draft is not None else 0
        ngram = None
        if k and isinstance(self.draft, NgramProposer):
            ngram = self.draft.longest, self.draft.shortest
        return RoundRule(
            k=k,
            params=params,
            draft_max_len=min(draft_max_len, self.max_model_len),
            max_model_len=self.max_model_len,
            eos_ids=torch.tensor(eos_ids, dtype=torch.int64, device=device),
            rates=rates,
            ngram=ngram,
        )

    def _make(self, rule: RoundRule) -> tuple[Pipeline, ...]:
        draft = self.draft if rule.k and isinstance(self.draft, DraftWorker) else None
        # Padding lies up to k tokens past the longest sequence; its columns hold block 0.
        held = min(self.allocator.blocks_for(self.max_model_len), self.allocator.num_usable)
        columns = held + self.allocator.blocks_for(rule.k + 1)
        device = self.target.model.device
        if device.type == "cuda" and self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        history = None
        if rule.ngram is not None:
            longest = min(self.max_model_len, held * self.allocator.block_size)
            history = self._history or History.empty(self.batch_size, longest + 1, device)
            self._history = history
        # The largest first: the smaller ones then find room in what it took.
        made = [
            Pipeline(self.target, draft, rule, count, columns, self.parallel, history, self._pool)
            for count in reversed(slot_counts(self.batch_size))
        ]
        return tuple(reversed(made))
