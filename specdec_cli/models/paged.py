"""A transformers model bound to a paged cache: spans in, logits out."""

from typing import Any

import torch

from specdec_cli.engine.batch import Span, make_batch
from specdec_cli.engine.kv_cache import KVCache
from specdec_cli.models.attention import PagedAttention, attach


class PagedModel:
    """Runs ragged passes through `module`, keeping keys and values in `cache`.

    vocab_size: width of the logits. foreign_ids: whether passes may hold ids past the vocabulary
    (a draft beside a target with more padding); they are fed as the last id, which can only make
    proposals worse, never the output wrong.
    """

    def __init__(self, module: Any, cache: KVCache, foreign_ids: bool = False) -> None:
        self.module = module
        self.cache = cache
        self.vocab_size: int = module.config.vocab_size
        self.foreign_ids = foreign_ids
        self._attention = PagedAttention(cache)
        attach(module, self._attention)

    @property
    def device(self) -> torch.device:
        return self.cache.device

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
        batch = make_batch(spans, logits_per_span, self.cache.block_size, self.device, extra_tokens)
        token_ids = batch.token_ids
        if self.foreign_ids:
            token_ids = token_ids.clamp(max=self.vocab_size - 1)
        self._attention.batch = batch
        out = self.module(
            input_ids=token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logit_rows,
        )
        self._attention.batch = None
        logits: torch.Tensor = out.logits[0]
        return logits
