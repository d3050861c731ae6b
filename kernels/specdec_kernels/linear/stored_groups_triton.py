"""Computes the addresses of a quantised weight's codes, scales and zeros, for kernels that decode
the codes in registers. Tiles are cut into slices, each within one group of columns, so that all
codes of a slice that belong to one row share a scale.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.linear.decode_triton import corrected, scale_of
from specdec_kernels.linear.stored import BLOCK, KINDS, TILE_ROWS, Stored

HALF = tl.constexpr(BLOCK // 2)  # distance between the columns of a byte's two values
ROWS = tl.constexpr(TILE_ROWS)


class Form(NamedTuple):
    """A weight's `Storage` as compile-time constants for kernels."""

    kind: str
    per_code: int  # values per byte
    high: int  # rows that share a scale
    wide: int  # columns that share a scale; 0 if all columns of a row do
    groups: int  # groups of columns in a row
    has_zeros: bool  # whether groups have zeros or minima
    has_minima: bool
    is_apart: bool  # whether low and high codes are scaled separately: see `Storage.is_apart`
    whole: int  # columns in complete blocks of 128
    rest: int  # the same as HALF, for an incomplete last block; 0 if all blocks are complete
    is_tiled: bool  # whether codes and scales are in the order of `Stored.tiled`

    @classmethod
    def of(cls, weight: Stored) -> "Form":
        kind, (high, wide) = weight.storage.kind, weight.storage.group
        per_code, groups = KINDS[kind].per_code, weight.scales.shape[-1]
        rest, minima = weight.shape[-1] % BLOCK, weight.storage.has_minima
        return cls(
            *(kind, per_code, high, wide, groups, weight.zeros is not None, minima),
            *(weight.storage.is_apart, weight.shape[-1] - rest, rest // 2),
            weight.storage.is_tiled,
        )


def form_of(weight: Tensor | Stored) -> Form | None:
    """Return the `Form` of a quantised weight, or None for an unquantised weight. The weight may be
    on the meta device."""
    return None if isinstance(weight, Tensor) else Form.of(weight)


def operands_of(weight: Tensor | Stored) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the three arguments that represent a weight in a kernel launch: the codes as bytes,
    the scales and the zeros of a quantised weight, or (weight, None, None) if it is not quantised.
    All tensors must be contiguous."""
    if isinstance(weight, Tensor):
        assert weight.is_contiguous()
        return weight, None, None
    assert all(field.is_contiguous() for field in weight.tensors)
    return weight.codes.view(torch.uint8), weight.scales, weight.zeros


@triton.jit
def rows_of(codes_ptr, scales_ptr, zeros_ptr, row, K: tl.constexpr, FORM: tl.constexpr):
    """Return pointers to the codes, scales and zeros of the rows with the numbers `row` [N]. A row
    has K values. For experts [E, R, K], row r of expert e has the number e * R + r, and R must be
    a multiple of FORM.high, so that no group has rows of two experts.
    """
    row = row.to(tl.int64)
    place = row // FORM.high * FORM.groups
    scales = scales_ptr + place
    zeros = scales  # a placeholder: a jitted function cannot return None in a tuple
    if FORM.has_zeros:
        zeros = zeros_ptr + place
    return codes_ptr + row * (K // FORM.per_code), scales, zeros


@triton.jit
def along_features(scale, FORM: tl.constexpr, SLICES: tl.constexpr):
    """Reshape the scales that `row_scales` returns so that they broadcast over sums [N, M] or
    [SLICES, N, M]."""
    if FORM.wide == 0:
        scale = tl.trans(scale)
        if SLICES > 1:
            scale = scale[None, :, :]
    return scale


@triton.jit
def bytes_of(start, WIDTH: tl.constexpr, SLICES: tl.constexpr):
    """Return the byte of a row of codes at which each slice of a tile begins: a scalar for one
    slice, otherwise [SLICES]. The tile begins at byte `start`, and slices are WIDTH bytes wide."""
    return start if SLICES == 1 else start + tl.arange(0, SLICES) * WIDTH


@triton.jit
def first_columns(start, begin_low, FORM: tl.constexpr):
    """Return the column of the first low code in each slice of a tile that begins at byte `start`.

    begin_low: the result of `first_low`, the same columns for a tile that begins at byte 0.
    """
    return begin_low + start * FORM.per_code


@triton.jit
def high_columns(low, FORM: tl.constexpr):
    """Return the columns of high codes. low: the columns of the low codes in the same bytes."""
    if FORM.rest > 0:  # an incomplete last block has shorter halves
        return low + tl.where(low < FORM.whole, HALF, FORM.rest)
    else:
        return low + HALF


@triton.jit
def in_slices(first, WIDTH: tl.constexpr, SLICES: tl.constexpr):
    """Return WIDTH consecutive indices for each slice, starting at `first`, a scalar or [SLICES].
    The result is [WIDTH], or [SLICES, WIDTH]."""
    places = tl.arange(0, WIDTH)
    return first + places if SLICES == 1 else first[:, None] + places[None, :]


@triton.jit
def of_groups(fields_ptr, column, live, FORM: tl.constexpr, SLICES: tl.constexpr):
    """Load one scale, or one zero, for each row and slice of a tile: [N, 1], or [SLICES, N, 1].

    fields_ptr: [N], pointers to the scales or zeros of rows. column: the first column of each
    slice, which determines its group.
    """
    group = column * 0
    if FORM.wide > 0:
        group = tl.minimum(column // FORM.wide, FORM.groups - 1)
    if SLICES == 1:
        return tl.load(fields_ptr + group, mask=live, other=0)[:, None]
    else:
        at = fields_ptr[None, :] + group[:, None]
        return tl.load(at, mask=live[None, :], other=0)[:, :, None]


@triton.jit
def groups_of(scales_ptr, zeros_ptr, column, live, FORM: tl.constexpr, SLICES: tl.constexpr):
    """Load the scales, and the zeros or minima, of the slices of a tile. Return both, in the shape
    that `of_groups` returns.

    column: the first column of each slice. If the weight has neither zeros nor minima, the zero is
    0. If each row has a single scale, return the scale 1, because `row_scaled` applies the row's
    scale to the sums at the end.
    """
    scale, zero = 1.0, 0
    if FORM.wide > 0:
        scale = of_groups(scales_ptr, column, live, FORM, SLICES)
    if FORM.has_zeros:
        zero = of_groups(zeros_ptr, column, live, FORM, SLICES)
    return scale, zero


@triton.jit
def tile_groups(
    scales_ptr, zeros_ptr, start, begin_low, live, FORM: tl.constexpr, SLICES: tl.constexpr
):
    """Load the scales and zeros of the tile that begins at byte `start`. Return the scales and
    zeros of its low codes, then those of its high codes, in the shapes that `groups_of` returns."""
    column = first_columns(start, begin_low, FORM)
    scale, zero = groups_of(scales_ptr, zeros_ptr, column, live, FORM, SLICES)
    scale_high, zero_high = scale, zero
    if FORM.is_apart:
        column = high_columns(column, FORM)
        scale_high, zero_high = groups_of(scales_ptr, zeros_ptr, column, live, FORM, SLICES)
    return scale, zero, scale_high, zero_high


@triton.jit
def row_scales(scales, live, FORM: tl.constexpr):
    """Load the scales as fp32 [1, N] if each row has a single scale. Otherwise return 1.

    scales: [N], pointers to the rows' scales.
    """
    scale = 1.0
    if FORM.wide == 0:
        scale = scale_of(tl.load(scales, mask=live, other=0))[None, :]
    return scale


@triton.jit
def row_scaled(sums, scale, FORM: tl.constexpr, dtype: tl.constexpr):
    """Finish fp32 sums from `stored_sums`.

    If there is one scale per row, call `corrected`, and multiply the sums by the scales. Otherwise,
    return the sums unchanged, because `stored_sums` has done both for each group.

    scale: the rows' scales, in a shape that broadcasts over the sums. dtype: the dtype of x.
    """
    if FORM.wide == 0:
        sums = corrected(sums, FORM, dtype) * scale
    return sums
