"""Blocks of a GGUF file as codes, scales and minima, for the types that can stay in stored form.

`Stored.plain` gives the numbers of `gguf.quants` bit for bit where scales are in fp32.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch
from specdec_kernels.linear.stored import INT4, INT8, Storage, packed
from torch import Tensor


class Layout(NamedTuple):
    """One type of block.

    fields: the parts in order, with their bytes: factors `d` of scales and `m` of minima, half
    floats; `scales`, the codes of both; `low`, the low four bits of values, and `high`, the other
    bits, or `whole` values. low: the number of bytes whose low halves all come before their high
    halves. high: the same for the high bits, and the number of bits in a byte.
    """

    storage: Storage
    fields: dict[str, int]
    low: int = 16
    high: tuple[int, int] = (1, 1)


def _storage(kind: str, wide: int = 32, has_minima: bool = False) -> Storage:
    return Storage(kind, (1, wide), scales=torch.float16, has_minima=has_minima)


_HIGHER, _K = {"high": 4, "low": 16}, {"d": 2, "m": 2, "scales": 12}
KEPT = {
    "Q4_0": Layout(_storage(INT4), {"d": 2, "low": 16}),
    "Q4_1": Layout(_storage(INT4, has_minima=True), {"d": 2, "m": 2, "low": 16}),
    "Q5_0": Layout(_storage(INT8), {"d": 2, **_HIGHER}),
    "Q5_1": Layout(_storage(INT8, has_minima=True), {"d": 2, "m": 2, **_HIGHER}),
    "Q8_0": Layout(_storage(INT8), {"d": 2, "whole": 32}),
    "Q4_K": Layout(_storage(INT4, has_minima=True), {**_K, "low": 128}, 32),
    "Q5_K": Layout(_storage(INT8, has_minima=True), {**_K, "high": 32, "low": 128}, 32, (32, 1)),
    "Q6_K": Layout(_storage(INT8, 16), {"low": 128, "high": 64, "scales": 16, "d": 2}, 64, (32, 2)),
}


def kept_as(kind: str, dtype: torch.dtype) -> Storage | None:
    """The storage of a type in a run of `dtype`; None if it is dequantised.

    A scale of the K types is the product of a half float and an integer of 6 or 8 bits. Runs in
    fp32 have it exactly. Other runs round it to a half float, by at most 2^-11; bf16 would round
    each number by up to 2^-8.
    """
    if (layout := KEPT.get(kind)) is None:
        return None
    is_exact = "scales" not in layout.fields or dtype != torch.float32
    return layout.storage if is_exact else replace(layout.storage, scales=torch.float32)


def shared_by(storages: Collection[Storage]) -> Storage:
    """An int8 storage that represents the values of several results of `kept_as` exactly."""
    wide = min(storage.group[1] for storage in storages)
    scales = max((storage.scales for storage in storages), key=lambda dtype: dtype.itemsize)
    return replace(
        _storage(INT8, wide, any(storage.has_minima for storage in storages)), scales=scales
    )


def fields_of(kind: str, blocks: Tensor, storage: Storage) -> list[Tensor]:
    """Codes, scales and, if the storage has them, minima.

    blocks: bytes [..., B, bytes of a block] of a type in `KEPT`. storage: a result of `kept_as`, or
    of `shared_by`. Raises `ValueError` for scales and minima that are not finite in their dtype.
    """
    layout = KEPT[kind]
    sizes = list(layout.fields.values())
    parts = dict(zip(layout.fields, blocks.split(sizes, -1), strict=True))
    numbers, factors = _numbers(layout, parts).flatten(-2), _factors(parts)
    if storage.kind == INT4:
        numbers = packed(numbers.add(0 if storage.has_minima else 8).to(torch.uint8))
    if storage.has_minima and "m" not in parts:
        factors.append(torch.zeros_like(factors[0]))
    repeats = layout.storage.group[1] // storage.group[1]
    shared = [f.flatten(-2).repeat_interleave(repeats, -1).to(storage.scales) for f in factors]
    if not all(bool(field.isfinite().all()) for field in shared):
        dtype = str(storage.scales).removeprefix("torch.")
        raise ValueError(f"scales that are not numbers, or too large for {dtype}")
    return [numbers, *shared]


def _numbers(layout: Layout, parts: dict[str, Tensor]) -> Tensor:
    """int8 [..., B, numbers of a block]; those of types without minima have both signs."""
    if (whole := parts.get("whole")) is not None:
        return whole.view(torch.int8)
    numbers, middle = _spread(parts["low"], layout.low, 4), 8
    if "high" in parts:
        width, bits = layout.high
        numbers, middle = numbers | _spread(parts["high"], width, bits) << 4, 8 << bits
    return numbers.to(torch.int8).sub_(0 if "m" in parts else middle)


def _factors(parts: dict[str, Tensor]) -> list[Tensor]:
    """The scales of the groups of each block, and their minima if they have some, fp32."""
    found = [parts[f].contiguous().view(torch.float16).float() for f in "dm" if f in parts]
    if "scales" in parts:
        shares = _shares(parts["scales"]) if "m" in parts else [parts["scales"].view(torch.int8)]
        found = [factor * share for factor, share in zip(found, shares, strict=True)]
    elif "m" in parts:  # these minima are added; those of the K types are subtracted
        found[1] = -found[1]
    return found


def _spread(content: Tensor, width: int, bits: int) -> Tensor:
    """Unpack values of `bits` bits: from each `width` bytes, first the lowest bits of all, then the
    next bits."""
    parts, mask = content.unflatten(-1, (-1, width)), (1 << bits) - 1
    return torch.stack([parts >> at & mask for at in range(0, 8, bits)], -2).flatten(-3)


def _shares(codes: Tensor) -> list[Tensor]:
    """The 8 integers of scales and the 8 of minima in 12 bytes."""
    from gguf.quants import Q4_K

    found = Q4_K.get_scale_min(codes.reshape(-1, 12).numpy())
    return [torch.from_numpy(part).view(*codes.shape[:-1], 8) for part in found]
