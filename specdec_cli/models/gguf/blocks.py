"""Split the blocks of a GGUF file into codes, scales and minima, for the types that can stay
quantised.

If the scales are in fp32, `Stored.plain` gives exactly the values that `gguf.quants` gives.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch
from specdec_kernels.linear.stored import INT4, INT8, Storage, packed
from torch import Tensor


class Layout(NamedTuple):
    """The layout of one type of block.

    storage: the storage that keeps the values of such blocks.
    fields: the fields of a block in order, with their sizes in bytes. `d` and `m` are half floats:
        the block's scale and minimum. In the K types, `scales` has integers for each group, and the
        scale and minimum of a group are `d` and `m` times the group's integers. `low` has the low
        four bits of each value, and `high` the other bits. Blocks of 8-bit values have `whole`
        instead of these two.
    low: the width of the runs in `low`, in bytes. In each run, the first values are in the low
        halves of the bytes, and the next values in the high halves.
    high: the width of the runs in `high`, in bytes, and the number of bits that each value has
        there. Runs are ordered as in `low`; see `_spread`.
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
    """Return the storage for a GGUF type if the model runs in `dtype`, or None if the type must be
    dequantised.

    A scale of the K types is the product of a half float and an integer of 6 or 8 bits. If `dtype`
    is fp32, the product is kept exactly. Otherwise it is rounded to a half float, with a relative
    error of at most 2^-11. Dequantising to bf16 would be less exact: it would round each value,
    with a relative error of up to 2^-8.
    """
    if (layout := KEPT.get(kind)) is None:
        return None
    is_exact = "scales" not in layout.fields or dtype != torch.float32
    return layout.storage if is_exact else replace(layout.storage, scales=torch.float32)


def shared_by(storages: Collection[Storage]) -> Storage:
    """Return an int8 storage that can hold the values of all `storages` exactly. storages: results
    of `kept_as`."""
    wide = min(storage.group[1] for storage in storages)
    scales = max((storage.scales for storage in storages), key=lambda dtype: dtype.itemsize)
    return replace(
        _storage(INT8, wide, any(storage.has_minima for storage in storages)), scales=scales
    )


def fields_of(kind: str, blocks: Tensor, storage: Storage) -> list[Tensor]:
    """Return the codes, the scales and, if the storage has minima, the minima of blocks.

    blocks: uint8 [..., B, bytes per block], of the type `kind` in `KEPT`. storage: a result of
    `kept_as` or `shared_by`. Raises `ValueError` for scales and minima that are not finite in their
    dtype.
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
        raise ValueError(f"scales that are NaN, infinite or too large for {dtype}")
    return [numbers, *shared]


def _numbers(layout: Layout, parts: dict[str, Tensor]) -> Tensor:
    """Return the codes of blocks, int8 [..., B, values per block]. They are centred on zero for
    types without minima, and never negative for the others."""
    if (whole := parts.get("whole")) is not None:
        return whole.view(torch.int8)
    numbers, middle = _spread(parts["low"], layout.low, 4), 8
    if "high" in parts:
        width, bits = layout.high
        numbers, middle = numbers | _spread(parts["high"], width, bits) << 4, 8 << bits
    return numbers.to(torch.int8).sub_(0 if "m" in parts else middle)


def _factors(parts: dict[str, Tensor]) -> list[Tensor]:
    """Return the scales of the groups in each block and, if there are any, their minima, fp32."""
    found = [parts[f].contiguous().view(torch.float16).float() for f in "dm" if f in parts]
    if "scales" in parts:
        shares = _shares(parts["scales"]) if "m" in parts else [parts["scales"].view(torch.int8)]
        found = [factor * share for factor, share in zip(found, shares, strict=True)]
    elif "m" in parts:  # negate: these files add minima, but `Stored` subtracts them
        found[1] = -found[1]
    return found


def _spread(content: Tensor, width: int, bits: int) -> Tensor:
    """Unpack values of `bits` bits each. In every run of `width` bytes, the first `width` values
    are in the lowest bits of the bytes, the next `width` values in the next bits, and so on."""
    parts, mask = content.unflatten(-1, (-1, width)), (1 << bits) - 1
    return torch.stack([parts >> at & mask for at in range(0, 8, bits)], -2).flatten(-3)


def _shares(codes: Tensor) -> list[Tensor]:
    """Unpack 12 bytes into 8 integer scales and 8 integer minima."""
    from gguf.quants import Q4_K

    found = Q4_K.get_scale_min(codes.reshape(-1, 12).numpy())
    return [torch.from_numpy(part).view(*codes.shape[:-1], 8) for part in found]
