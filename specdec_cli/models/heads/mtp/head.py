"""The forward pass of an MTP module.

Row t joins the normed embedding of token t + 1 and the normed hidden state of token t, which comes
from the target's final norm, and projects these 2 * H values to H. A layer of the target's family,
a norm and the target's output matrix follow. Legend: T packed rows, H width of the target.
"""

from dataclasses import replace
from typing import Any

import torch
from specdec_kernels import ops
from torch import Tensor, nn

from specdec_cli.core.batch import ForwardBatch
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.models.attention import PagedAttention, attach
from specdec_cli.models.fused import FusedForward
from specdec_cli.models.heads.mtp.config import MtpConfig
from specdec_cli.models.heads.net import Head
from specdec_cli.models.split_products import SplitProducts


class MtpHead(Head):
    """The network of an MTP module.

    module: a model of one layer, with final norm, embedding and output matrix.
    fused: the fused form of `module`; None if its layer cannot be fused.
    tensors: the projection and its norms, which are not split over ranks.
    """

    config: MtpConfig

    def __init__(
        self,
        config: MtpConfig,
        module: Any,
        fused: FusedForward | None,
        parallel: TensorParallel,
    ) -> None:
        self.config, self.feeds_norm = config, config.keys.mtp_fed_back != "raw"
        self.eps = float(module.config.rms_norm_eps)
        self.projection = ops.pack_weight(module.eh_proj.weight.data)
        self.embedding_norm, self.hidden_norm = module.enorm.weight.data, module.hnorm.weight.data
        self.norm = module.model.norm.weight.data
        self.fused, self.decoder = fused, module.model
        for part in module.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = config.index  # the modules share a cache, one layer each
        if fused is not None:
            (layer,) = fused.stack.layers
            fused.stack.layers[0] = replace(layer, index=config.index)
            self.embedding, self.head, self.split = fused.embedding, fused.head, fused.stack.split
            return
        self.embedding = module.model.embed_tokens.weight.data
        self.head = ops.pack_weight(module.lm_head.weight.data)
        sizes = config.hidden_size, config.vocab_size, module.dtype
        self.split = SplitProducts.over(parallel, *sizes)
        module.model.norm = nn.Identity()
        self._attention: PagedAttention | None = None

    @property
    def held(self) -> list[Any]:
        return [*super().held, *self.decoder.parameters(), *self.decoder.buffers()]

    @property
    def storages(self) -> dict[int, int]:
        return super().storages | (self.fused.storages if self.fused is not None else {})

    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's hidden states [T, H] in the module's dtype. Nothing else is needed,
        because an MTP module reads only one hidden state per token."""
        return features.to(self.dtype)

    def __call__(
        self, token_ids: Tensor, hidden: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> ops.Normed:
        if self.fused is None:
            embedded = nn.functional.embedding(token_ids, self.embedding)
            x = self._joined(ops.rms_norm(embedded, self.embedding_norm, self.eps), hidden, batch)
            out = self._run(x, batch, cache)
            return self.normed(torch.cat((out, hidden), 1) if self.config.reads_target else out)
        embeds, cos, sin = ops.embed(
            *(token_ids, batch.positions, self.embedding, self.fused.cos, self.fused.sin),
            *(self.embedding_norm, self.eps),
        )
        x = self._joined(embeds.scaled, hidden, batch)
        stack = self.fused.stack
        scaled = ops.rms_norm(x, stack.layers[0].attention_norm, self.eps)
        start = ops.Normed(x, scaled, None, self.eps), cos, sin
        return stack.run(start, batch, cache)

    def normed(self, hidden: Tensor) -> ops.Normed:
        """Apply the final norm to `hidden` [T, H]. If all modules read the target's hidden states,
        `hidden` is [T, 2H]: the module's own hidden states, which are normed, and then the
        target's, which are not."""
        own = hidden[:, : self.config.hidden_size].contiguous()
        return super().normed(own)._replace(hidden=hidden)

    def fed_back(self, x: ops.Normed) -> Tensor:
        if self.config.reads_target:
            return x.hidden[:, self.config.hidden_size :]
        return super().fed_back(x)

    def _joined(self, embedded: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute the layer's input [T, H] from normed embeddings and hidden states."""
        if self.config.keys.mtp_first_embedding == "zeroed":
            embedded = embedded.masked_fill((batch.positions == 0)[:, None], 0.0)
        normed = ops.rms_norm(hidden.contiguous(), self.hidden_norm, self.eps)
        return ops.linear(torch.cat((embedded, normed), dim=1), self.projection)

    def _run(self, x: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Run transformers' own layer over the paged cache. Returns hidden states [T, H]."""
        if self._attention is None or self._attention.cache is not cache:
            self._attention = PagedAttention(cache)
            attach(self.decoder, self._attention)
        self._attention.batch = batch
        try:
            positions = batch.positions[None]
            out = self.decoder(inputs_embeds=x[None], position_ids=positions, use_cache=False)
        finally:
            self._attention.batch = None
        found: Tensor = out.last_hidden_state[0]
        return found
