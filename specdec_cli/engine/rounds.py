"""The padded rounds of an engine: one pipeline for each rule and number of slots, captured once."""

from collections.abc import Hashable
from typing import Any

import torch

from specdec_cli.engine.draft import AbsentDraft, DraftWorker
from specdec_cli.engine.kv_cache import BlockAllocator
from specdec_cli.engine.padded import RoundRule
from specdec_cli.engine.parallel import TensorParallel
from specdec_cli.engine.pipeline import Pipeline
from specdec_cli.engine.synthetic import SyntheticAcceptance
from specdec_cli.engine.target import TargetScorer
from specdec_cli.engine.types import SamplingParams


def slot_counts(batch_size: int) -> list[int]:
    """The numbers of slots that rounds are captured for, so that the end of a run, when few
    sequences are left, costs about what they cost: a quarter each of the next, as more would be
    slow to compile."""
    counts = [batch_size]
    while counts[0] > 1:
        counts.insert(0, -(-counts[0] // 4))
    return counts


class PaddedRounds:
    """Rounds over the models and caches of one engine, at one batch size.

    draft: None or of another kind where rounds of proposals cannot be padded. max_model_len: most
    tokens a sequence may hold. eos_ids: ids that end a sequence. synthetic: accept by given rates.
    """

    def __init__(
        self,
        target: TargetScorer,
        draft: DraftWorker | AbsentDraft | None,
        allocator: BlockAllocator,
        *,
        batch_size: int,
        max_model_len: int,
        eos_ids: frozenset[int],
        synthetic: SyntheticAcceptance | None,
        parallel: TensorParallel,
    ) -> None:
        self._target = target
        self._draft = draft
        self._allocator = allocator
        self._batch_size = batch_size
        self._max_model_len = max_model_len
        self._eos_ids = eos_ids
        self._synthetic = synthetic
        self._parallel = parallel
        self._made: dict[Hashable, tuple[Pipeline, ...]] = {}
        self._pool: Any = None  # memory that captured rounds share

    def of(self, k: int, params: SamplingParams) -> tuple[Pipeline, ...]:
        """Those of proposal length `k`, by number of slots; captured when first asked for. None
        where the proposer is no model."""
        if k and self._draft is None:
            return ()
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
        self._pool = None

    def _rule(self, k: int, params: SamplingParams) -> RoundRule:
        device = self._target.model.device
        rates = None
        if self._synthetic is not None and k:
            rates = torch.tensor(self._synthetic.rates(k), device=device)
        eos_ids = [] if params.ignore_eos else sorted(self._eos_ids)
        draft_max_len = self._draft.max_len if k and self._draft is not None else 0
        return RoundRule(
            k=k,
            params=params,
            draft_max_len=min(draft_max_len, self._max_model_len),
            max_model_len=self._max_model_len,
            eos_ids=torch.tensor(eos_ids, dtype=torch.int64, device=device),
            rates=rates,
        )

    def _make(self, rule: RoundRule) -> tuple[Pipeline, ...]:
        draft = self._draft if rule.k and isinstance(self._draft, DraftWorker) else None
        # Padding lies up to k tokens past the longest sequence; its columns hold block 0.
        held = min(self._allocator.blocks_for(self._max_model_len), self._allocator.num_usable)
        columns = held + self._allocator.blocks_for(rule.k + 1)
        if self._target.model.device.type == "cuda" and self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # The largest first: the smaller ones then find room in what it took.
        made = [
            Pipeline(self._target, draft, rule, count, columns, self._parallel, self._pool)
            for count in reversed(slot_counts(self._batch_size))
        ]
        return tuple(reversed(made))
