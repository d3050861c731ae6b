"""The attention function that transformers' models call, and what it delegates to.

transformers looks up one function by name. That function asks the calling module for the object
attached to its model, so two models, or a probe and a run, never share state: nothing is global.
"""

from typing import Any, Protocol

import torch
from specdec_kernels import ops
from transformers import AttentionInterface

from specdec_cli.engine.batch import ForwardBatch
from specdec_cli.engine.kv_cache import KVCache

ATTENTION_NAME = "specdec_paged"
_ATTACHED = "specdec_attention"


class Attention(Protocol):
    """What a model's attention layers call.

    query: [H, T, Dk]; key: [Hkv, T, Dk]; value: [Hkv, T, Dv], after rotary embedding. Returns
    [T, H, Dv].
    """

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor: ...


def attach(model: torch.nn.Module, attention: Attention) -> None:
    """Make every attention layer of `model` call `attention`."""
    for module in model.modules():
        # Past nn.Module's own __setattr__: an attention object must not become a submodule.
        module.__dict__[_ATTACHED] = attention


def _dispatch(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: q, k, v of [1, heads, T, dim]; no mask is ever built.

    Window, softcap and sinks are taken from the call alone: some families keep a stale
    `sliding_window` attribute on layers that attend to everything.
    """
    attention: Attention = module.__dict__[_ATTACHED]
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = attention.attend(
        layer,
        query[0],
        key[0],
        value[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out[None], None


# Only the attention function is registered, no mask function: an unknown mask name makes
# transformers skip building masks, which a paged pass has no use for.
AttentionInterface.register(ATTENTION_NAME, _dispatch)


class PagedAttention:
    """Writes a pass's keys and values to the cache and attends over it."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.batch: ForwardBatch | None = None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        batch = self.batch
        assert batch is not None, "attention called outside a pass"
        key_cache, value_cache = self.cache.layers[layer]
        ops.write_kv(
            key.transpose(0, 1), value.transpose(0, 1), key_cache, value_cache, batch.slots
        )
        query = query.transpose(0, 1)
        if batch.plan is not None:
            return ops.gather_attention(
                query, key_cache, value_cache, batch.plan, scale, sliding_window, softcap, sinks
            )
        return ops.paged_attention(
            query,
            key_cache,
            value_cache,
            batch.block_tables,
            batch.query_start,
            batch.context_lens,
            scale,
            batch.max_query_len,
            sliding_window,
            softcap,
            sinks,
        )
