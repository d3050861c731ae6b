"""A transformers model bound to a paged cache: tokens in, logits out."""

from typing import Any

import torch
from specdec_kernels import ops

from specdec_cli.core.batch import ForwardBatch, Rectangle, Span, live_batch, make_batch
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.core.state import BatchState
from specdec_cli.models.attention import PagedAttention, attach
from specdec_cli.models.compiled import CompiledForward
from specdec_cli.models.fused import FusedForward


class PagedModel:
    """Runs passes through `module`, keeping keys and values in `cache`.

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
    def forward(self, spans: list[Span], logits_per_span: list[int]) -> torch.Tensor:
        """Feed `spans`; logits [M, V] of the last rows of each span, in the model's dtype.

        Arguments as in `core.batch.make_batch`.
        """
        return self._run(make_batch(spans, logits_per_span, self.cache.block_size, self.device))

    @torch.inference_mode()
    def forward_slots(self, what: Rectangle, state: BatchState) -> torch.Tensor:
        """Feed tokens of every slot, as `what` says; keys and values of padding go to waste.

        Returns logits [B, Q, V], or [B, 1, V] of the last tokens; those of padding mean nothing.
        """
        batch, width = what.token_ids.shape
        block_size = self.cache.block_size
        if self.device.type == "cpu" and self.compiled is None:
            found, places = live_batch(what, state, block_size, self.vocab_size)
            if places is None:
                return self._run(found).view(batch, -1, self.vocab_size)
            num_rows = batch * (1 if what.last_only else width)
            whole = torch.zeros(num_rows, self.vocab_size, dtype=self.module.dtype)
            if len(places):
                whole.index_copy_(0, places, self._run(found))
            return whole.view(batch, -1, self.vocab_size)
        ids, positions, kv_slots, context_lens = ops.padded_pass(
            what.token_ids,
            state.length,
            what.lens,
            state.active,
            state.block_tables,
            what.offset,
            what.margin,
            block_size,
            what.max_len,
            self.vocab_size,
        )
        query_start, last_rows = self._rectangle(batch, width)
        padded = ForwardBatch(
            token_ids=ids,
            positions=positions,
            slots=kv_slots,
            query_start=query_start,
            context_lens=context_lens,
            block_tables=state.block_tables,
            max_query_len=width,
            logit_rows=last_rows if what.last_only and width > 1 else None,
            plan=None
            if self.device.type != "cpu"
            else ops.gather_plan(state.block_tables, query_start, context_lens, block_size),
        )
        logits = self._run(padded, self.compiled)
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
