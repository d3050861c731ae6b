"""The arguments of a layer's attention, and its KV cache. The model passes both to the kernels."""

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


class LayerCache(NamedTuple):
    """The keys and values of a layer, contiguous."""

    keys: Tensor
    """[NB, BS, Hkv, Dk], by block and slot in it."""
    values: Tensor
    """[NB, BS, Hkv, Dv], by block and slot in it."""
    scales: Tensor | None = None
    """[2, Hkv] fp32, contiguous, positive: the scales of keys and of values. An `FP8` cache holds
    values divided by the scales and clamped to its range. None: values in the queries' dtype."""

    @property
    def sides(self) -> tuple["Side", "Side"]:
        """Keys and values, each with their scales."""
        keys, values = (None, None) if self.scales is None else self.scales
        return Side(self.keys, keys), Side(self.values, values)

    @property
    def is_sound(self) -> bool:
        """True if shapes and layouts fit, and the cache has scales if and only if it is in fp8."""
        keys, values, scales = self
        is_alike = keys.shape[:3] == values.shape[:3] and keys.dtype == values.dtype
        has_scales = scales is None or (
            scales.shape == (2, keys.shape[2])
            and scales.dtype == torch.float32
            and scales.is_contiguous()
        )
        is_flat = keys.is_contiguous() and values.is_contiguous()
        return is_alike and is_flat and has_scales and (keys.dtype == FP8) == (scales is not None)


class Side(NamedTuple):
    """The keys or the values of a layer. pool: [..., Hkv, D]. scales: [Hkv], or None."""

    pool: Tensor
    scales: Tensor | None

    def coded(self, x: Tensor) -> Tensor:
        """Convert heads [..., Hkv, D] to the format in which the pool stores them."""
        if self.scales is None:
            return x
        return (x.float() / self.scales[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)

    def decoded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert heads [..., Hkv, D] from the pool to `dtype`."""
        return x if self.scales is None else (x.float() * self.scales[:, None]).to(dtype)


class AttentionCall(NamedTuple):
    """A layer's arguments to attention, the same in every pass."""

    scale: float
    """Positive factor on the scores."""
    sliding_window: int = 0
    """A key is visible iff its position > the query's - window and, unless rows are causal, < the
    query's + window. 0 means no window."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap), as in Gemma 2; 0 for none."""
    sinks: Tensor | None = None
    """[H], per-head logits that join the softmax and carry no value, as in GPT-OSS."""
    causal: bool = True
    """If false, the rows of a pass also see later rows, but no padding."""


class Form(NamedTuple):
    """Sizes of a layer and its cache that are compile-time constants of kernels. group: the number
    of query heads per key head."""

    kv_heads: int
    group: int
    dim: int
    value_dim: int
    block_size: int
    window: int
    has_softcap: bool
    causal: bool


def form_of(call: AttentionCall, num_heads: int, cache: LayerCache) -> Form:
    """Return the sizes of a layer with `num_heads` query heads."""
    _, block_size, kv_heads, dim = cache.keys.shape
    return Form(
        *(kv_heads, num_heads // kv_heads, dim, cache.values.shape[3], block_size),
        *(call.sliding_window, call.softcap > 0, call.causal),
    )
