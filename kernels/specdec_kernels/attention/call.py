"""A layer's arguments to attention: one value, from the model to the kernels."""

from typing import NamedTuple

from torch import Tensor


class AttentionCall(NamedTuple):
    """A layer's arguments to attention, the same in every pass."""

    scale: float
    """Positive factor on the scores."""
    sliding_window: int = 0
    """A key is visible iff its position > the query's - window, and < the query's + window where
    rows are not causal; 0 for no window."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap), as in Gemma 2; 0 for none."""
    sinks: Tensor | None = None
    """[H], per-head logits that join the softmax and carry no value, as in GPT-OSS."""
    causal: bool = True
    """False: the rows of a pass also see the rows after them, but no padding."""


class Form(NamedTuple):
    """The sizes of a layer and its cache that attention kernels are compiled for.

    group: query heads of a key head. dim: numbers of a head of queries and keys.
    """

    kv_heads: int
    group: int
    dim: int
    value_dim: int
    block_size: int
    window: int
    has_softcap: bool
    causal: bool


def form_of(call: AttentionCall, num_heads: int, key_cache: Tensor, value_cache: Tensor) -> Form:
    """The form of a layer with caches [NB, BS, Hkv, Dk] and [NB, BS, Hkv, Dv]."""
    _, block_size, kv_heads, dim = key_cache.shape
    return Form(
        *(kv_heads, num_heads // kv_heads, dim, value_cache.shape[3], block_size),
        *(call.sliding_window, call.softcap > 0, call.causal),
    )
