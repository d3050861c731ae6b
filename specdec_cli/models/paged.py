"""A transformers model bound to a paged cache: spans in, logits out."""

from typing import Any

import torch
from specdec_kernels import ops

from specdec_cli.core.batch import ForwardBatch, Span, make_batch
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.core.state import Slots
from specdec_cli.models.attention import PagedAttention, attach
from specdec_cli.models.compiled import CompiledForward
from specdec_cli.models.fused import FusedForward


class PagedModel:
    """Runs ragged passes through `module`, keeping keys and values in `cache`.

    vocab_size: width of the logits. foreign_ids: whether passes may hold ids past the vocabulary
    (a draft beside a target with more padding); they are fed as the last id, which can only make
    proposals worse, never the output wrong. fused: runs all passes in place of `module`.
    compiled: runs padded passes in place of `module`.
    """

    def __init__(
        self,
        module: Any,
        cache: KVCache,
        foreign_ids: bool = False,
        fused: FusedForward | None = None,
    ) -> None:
        self.module = module
        self.cache = cache
        self.vocab_size: int = module.config.vocab_size
        self.foreign_ids = foreign_ids
        self.fused = fused
        self.compiled: CompiledForward | None = None
        self._rectangles: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._attention = PagedAttention(cache)
        attach(module, self._attention)

    @property
    def device(self) -> torch.device:
        return self.cache.device

    def use(self, cache: KVCache) -> None:
        """Keep keys and values in `cache` from now on; what was captured over another is void."""
        self.cache = self._attention.cache = cache

    @property
    def storages(self) -> dict[int, int]:
        """Bytes of each piece of memory that holds weights and tables, by its address."""
        held = [*self.module.parameters(), *self.module.buffers()]
        pieces = [tensor.untyped_storage() for tensor in held]
        found = {piece.data_ptr(): piece.nbytes() for piece in pieces}
        return found if self.fused is None else found | self.fused.storages

    @torch.inference_mode()
    def forward(
        self,
        spans: list[Span],
        logits_per_span: list[int],
        extra_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Feed `spans`; logits [M, V] of the last rows of each span, in the model's dtype.

        Arguments as in `engine.batch.make_batch`.
        """
        return self._run(
            make_batch(spans, logits_per_span, self.cache.block_size, self.device, extra_tokens)
        )

    @torch.inference_mode()
    def forward_padded(
        self,
        token_ids: torch.Tensor,
        slots: Slots,
        lens: torch.Tensor,
        *,
        offset: int,
        margin: int,
        max_len: int,
        last_only: bool,
    ) -> torch.Tensor:
        """Feed Q tokens of every slot at positions length + offset + 0..Q-1.

        token_ids: int64 [B, Q]. lens: int64 [B], proposal lengths. Which tokens are padding
        follows from lens and `margin`, see `ops.padded_pass`; their logits mean nothing. max_len:
        positions the model knows. Returns logits [B, Q, V], or [B, 1, V] of the last tokens.
        """
        batch, width = token_ids.shape
        block_size = self.cache.block_size
        ids, positions, kv_slots, context_lens = ops.padded_pass(
            token_ids,
            slots.length,
            lens,
            slots.active,
            slots.block_tables,
            offset,
            margin,
            block_size,
            max_len,
            self.vocab_size,
        )
        query_start, last_rows = self._rectangle(batch, width)
        plan = None
        if self.device.type == "cpu":
            plan = ops.gather_plan(slots.block_tables, query_start, context_lens, block_size)
        logits = self._run(
            ForwardBatch(
                token_ids=ids,
                positions=positions,
                slots=kv_slots,
                query_start=query_start,
                context_lens=context_lens,
                block_tables=slots.block_tables,
                max_query_len=width,
                logit_rows=last_rows if last_only and width > 1 else None,
                plan=plan,
            ),
            self.compiled,
        )
        return logits.view(batch, -1, logits.shape[-1])

    def _rectangle(self, batch: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each sequence's queries begin, int32 [B + 1], and their last rows, int64 [B]."""
        if (batch, width) not in self._rectangles:
            starts = width * torch.arange(batch + 1, device=self.device)
            self._rectangles[batch, width] = (starts.to(torch.int32), starts[1:] - 1)
        return self._rectangles[batch, width]

    def _run(self, batch: ForwardBatch, compiled: CompiledForward | None = None) -> torch.Tensor:
        """Logits [M, V] of the rows that `batch` wants."""
        token_ids = batch.token_ids
        if self.foreign_ids:
            token_ids = token_ids.clamp(max=self.vocab_size - 1)
        if self.fused is not None:
            return self.fused(token_ids, batch, self.cache)
        self._attention.batch = batch
        try:
            if compiled is not None:
                return compiled(token_ids, batch.positions, batch.logit_rows)
            out = self.module(
                input_ids=token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=0 if batch.logit_rows is None else batch.logit_rows,
            )
        finally:
            self._attention.batch = None
        logits: torch.Tensor = out.logits[0]
        return logits
