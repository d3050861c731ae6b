"""The attention function that transformers' models call, and the paged attention behind it.

transformers looks up the attention function by name, so all models call the same function. It
passes the call on to the attention object that `attach` put on the calling layer. Each model has
its own object, so two models, or a probe and a run, never share state.
"""

import itertools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from specdec_kernels import ops
from torch import Tensor
from transformers import AttentionInterface

from specdec_cli.core.batch import ForwardBatch
from specdec_cli.core.kv_cache import KVCache, LayerShape

ATTENTION_NAME = "specdec_paged"
_ATTACHED = "specdec_attention"
_WINDOW = "specdec_window"

# Arguments that models pass to attention but that do not change its result. `position_ids` is for
# kernels that detect packed sequences.
_WITHOUT_EFFECT = {
    "dropout",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
}


class NotPlainAttention(Exception):
    """Raised if a layer asks for a kind of attention that paged passes do not compute. The message
    names it."""


class Attention(Protocol):
    """The attention that a model's layers call after rotary embedding.

    query: [H, T, Dk], for T tokens and H query heads.
    key: [Hkv, T, Dk], for Hkv key and value heads.
    value: [Hkv, T, Dv].

    Returns [T, H, Dv].
    """

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: ops.AttentionCall
    ) -> Tensor: ...


class Recorder:
    """Attention that returns zeros and records each call's layer, cache shape and arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, LayerShape, ops.AttentionCall]] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: ops.AttentionCall
    ) -> Tensor:
        heads, tokens, _key_dim = query.shape
        shape = LayerShape(key.shape[0], key.shape[-1], value.shape[-1])
        self.calls.append((layer, shape, call))
        return query.new_zeros(tokens, heads, value.shape[-1])


def attach(model: torch.nn.Module, attention: Attention) -> None:
    """Attach `attention` to every attention layer of `model`."""
    for module in model.modules():
        # Bypass nn.Module's own __setattr__: the attention object must not become a submodule.
        module.__dict__[_ATTACHED] = attention


_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")


@contextmanager
def masks_named(model: torch.nn.Module) -> Iterator[None]:
    """Let the code of `model`, during the `with` block, pass placeholders to attention where it
    would compute masks for eager attention. The layers keep their windows: some families have a
    window in the mask only, and in others the call names one that the mask does not have."""
    modules = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    code = [vars(sys.modules[name]) for name in modules]
    made = [(names, key, names[key]) for names in code for key in _MASKS if key in names]
    try:
        for names, key, _ in made:
            names[key] = partial(_placeholder, key)
        yield
    finally:
        for names, key, function in made:
            names[key] = function


def _placeholder(function: str, config: Any, *_: Any, **more: Any) -> Tensor:
    """Return a tensor without content for the mask that transformers' `function` would make. If
    that is a causal mask with at most a sliding window, the tensor has the window as attribute."""
    mask = torch.empty(1, 1, 1, 1, device="meta")
    changes = ("or_mask_function", "and_mask_function", "block_sequence_ids")
    if function in _MASKS[:2] and all(more.get(key) is None for key in changes):
        window = getattr(config, "sliding_window", None) if "sliding" in function else None
        vars(mask)[_WINDOW] = window
    return mask


def _dispatch(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Call the attention that is attached to `module`. transformers defines this signature.

    query, key, value: [1, heads, T, dim].
    attention_mask: None, or a placeholder in a trial pass.

    Returns [1, T, heads, dim] and None. Raises `NotPlainAttention` for arguments that paged
    attention does not support. A layer's sliding window is that of its mask in the trial pass, or
    if it got none there, that of the call. Other settings are taken from the call, because a
    layer's attributes may differ from them.
    """
    if attention_mask is not None and hasattr(attention_mask, _WINDOW):
        module.__dict__[_WINDOW] = getattr(attention_mask, _WINDOW)
    elif attention_mask is not None:
        raise NotPlainAttention("its layers compute an attention mask of their own")
    unknown = {key for key, value in more.items() if value is not None} - _WITHOUT_EFFECT
    if unknown:
        raise NotPlainAttention(f"its layers ask for attention with {', '.join(sorted(unknown))}")
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        heads = ", ".join(str(states.shape[1]) for states in (query, key, value))
        raise NotPlainAttention(f"the numbers of query, key and value heads do not match: {heads}")
    attention: Attention = module.__dict__[_ATTACHED]
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = module.__dict__.get(_WINDOW, sliding_window) or 0
    call = ops.AttentionCall(scale, window, softcap or 0.0, s_aux)
    states = layer, query[0], key[0], value[0]
    if torch.compiler.is_compiling():
        assert isinstance(attention, PagedAttention)
        out = attend_by_handle(attention.handle, *states, *call)
    else:
        out = attention.attend(*states, call)
    return out[None], None


# Register an attention function but no mask function. transformers then builds no masks, and paged
# passes need none.
AttentionInterface.register(ATTENTION_NAME, _dispatch)


# A compiled graph can hold integers but not objects, so it refers to its attention by number.
_handles = itertools.count()
_by_handle: weakref.WeakValueDictionary[int, "PagedAttention"] = weakref.WeakValueDictionary()


# The operator also writes to the cache. This need not be declared, because the cache is not an
# input of the graph, and each layer's input depends on the previous layer's output, which keeps the
# calls in order.
@torch.library.custom_op("specdec::attend", mutates_args=())
def attend_by_handle(
    handle: int,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
    causal: bool,
) -> Tensor:
    """Run `PagedAttention.attend` as an opaque operator in compiled graphs."""
    call = ops.AttentionCall(scale, sliding_window, softcap, sinks, causal)
    return _by_handle[handle].attend(layer, query, key, value, call)


@attend_by_handle.register_fake
def _attend_shape(
    handle: int, layer: int, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> Tensor:
    return query.new_empty(query.shape[1], query.shape[0], value.shape[-1])


class PagedAttention:
    """Writes a pass's keys and values to the cache and attends over it."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.batch: ForwardBatch | None = None
        self.handle = next(_handles)
        _by_handle[self.handle] = self

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: ops.AttentionCall
    ) -> Tensor:
        batch = self.batch
        assert batch is not None, "attention called outside a pass"
        cache = self.cache.layers[layer]
        ops.write_kv(key.transpose(0, 1), value.transpose(0, 1), cache, batch.slots)
        query = query.transpose(0, 1)
        if batch.plan is not None:
            return ops.gather_attention(query, cache, batch.plan, call)
        lengths = batch.block_tables, batch.query_start, batch.context_lens
        return ops.paged_attention(query, cache, *lengths, batch.max_query_len, call, batch.slots)
