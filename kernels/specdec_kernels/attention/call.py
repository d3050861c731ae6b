"""A layer's attention settings and its KV cache, in the form that the model passes to the
kernels."""

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


class LayerCache(NamedTuple):
    """The cached keys and values of a layer: contiguous tensors of NB blocks with BS slots each."""

    keys: Tensor
    """[NB, BS, Hkv, Dk]."""
    values: Tensor
    """[NB, BS, Hkv, Dv]."""
    scales: Tensor | None = None
    """[2, Hkv] fp32, contiguous, positive: the scales of the keys and those of the values. An `FP8`
    cache stores numbers divided by their scale and clamped to the range of `FP8`. None if the cache
    is not in fp8; then it has the dtype of the queries."""

    @property
    def sides(self) -> tuple["Side", "Side"]:
        """Keys and values, each with their scales."""
        keys, values = (None, None) if self.scales is None else self.scales
        return Side(self.keys, keys), Side(self.values, values)

    @property
    def is_sound(self) -> bool:
        """True if shapes and layouts are valid, and there are scales if and only if the cache is
        fp8."""
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
    """Either the keys or the values of a layer's cache."""

    pool: Tensor
    """[..., Hkv, D], the cache tensor."""
    scales: Tensor | None
    """[Hkv], or None if the cache is not in fp8."""

    def coded(self, x: Tensor) -> Tensor:
        """Convert heads [..., Hkv, D] to the format in which the pool stores them."""
        if self.scales is None:
            return x
        return (x.float() / self.scales[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)

    def decoded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert heads [..., Hkv, D] from the pool to `dtype`."""
        return x if self.scales is None else (x.float() * self.scales[:, None]).to(dtype)


class AttentionCall(NamedTuple):
    """The settings of a layer's attention. They are the same in every forward pass."""

    scale: float
    """Positive factor by which the scores are multiplied."""
    sliding_window: int = 0
    """A query sees a key only if key position > query position - window and, if not `causal`, also
    key position < query position + window. 0 means no window."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap), as in Gemma 2. 0 means no softcap."""
    sinks: Tensor | None = None
    """[H], one logit per head that takes part in the softmax but has no value, as in GPT-OSS. None
    if the layer has no sinks."""
    causal: bool = True
    """If false, a query also sees the keys of later tokens in its sequence, but not those of
    padding."""


class Form(NamedTuple):
    """Properties of a layer and its cache that are compile-time constants of kernels."""

    kv_heads: int
    group: int
    """Query heads per key head."""
    dim: int
    value_dim: int
    block_size: int
    window: int
    has_softcap: bool
    causal: bool


def form_of(call: AttentionCall, num_heads: int, cache: LayerCache) -> Form:
    """Return the compile-time constants of a layer with `num_heads` query heads."""
    _, block_size, kv_heads, dim = cache.keys.shape
    return Form(
        *(kv_heads, num_heads // kv_heads, dim, cache.values.shape[3], block_size),
        *(call.sliding_window, call.softcap > 0, call.causal),
    )
