"""Computes the addresses of a quantised weight's codes, scales and zeros, for kernels that decode
them in registers. A tile is cut into slices so that each slice lies in one group of columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.linear.decode_triton import corrected, scale_of
from specdec_kernels.linear.stored import BLOCK, KINDS, Stored

HALF = tl.constexpr(BLOCK // 2)  # distance in columns of a byte's two values


class Form(NamedTuple):
    """A weight's `Storage` as compile-time constants for kernels."""

    kind: str
    per_code: int  # values per byte
    high: int  # rows that share a scale
    wide: int  # columns that share a scale; 0 if a whole row does
    groups: int  # groups of columns in a row
    has_zeros: bool  # zeros or minima
    has_minima: bool
    is_apart: bool  # whether the two values of a byte may have different scales, or have minima
    whole: int  # columns in blocks of full length
    rest: int  # columns between the two values of a byte in a shorter last block; 0 without one

    @classmethod
    def of(cls, weight: Stored) -> "Form":
        kind, (high, wide) = weight.storage.kind, weight.storage.group
        per_code, groups = KINDS[kind].per_code, weight.scales.shape[-1]
        rest, minima = weight.shape[-1] % BLOCK, weight.storage.has_minima
        return cls(
            *(kind, per_code, high, wide, groups, weight.zeros is not None, minima),
            *(weight.storage.is_apart, weight.shape[-1] - rest, rest // 2),
        )


def form_of(weight: Tensor | Stored) -> Form | None:
    """Return the form of a quantised weight, which may be on the meta device; None for a plain
    weight."""
    return None if isinstance(weight, Tensor) else Form.of(weight)


def operands_of(weight: Tensor | Stored) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the tensors that a kernel gets for a weight: a quantised weight's codes as bytes,
    scales and zeros; or a plain weight and two times None. All must be contiguous."""
    if isinstance(weight, Tensor):
        assert weight.is_contiguous()
        return weight, None, None
    assert all(field.is_contiguous() for field in weight.tensors)
    return weight.codes.view(torch.uint8), weight.scales, weight.zeros


@triton.jit
def rows_of(codes_ptr, scales_ptr, zeros_ptr, row, K: tl.constexpr, FORM: tl.constexpr):
    """Return pointers to the codes, scales and zeros of rows [N] with K numbers each. Row numbers
    continue from one expert to the next, and no group has rows of two experts.
    """
    row = row.to(tl.int64)
    place = row // FORM.high * FORM.groups
    scales = scales_ptr + place
    zeros = scales  # instead of None, which functions cannot return among other results
    if FORM.has_zeros:
        zeros = zeros_ptr + place
    return codes_ptr + row * (K // FORM.per_code), scales, zeros


@triton.jit
def along_features(scale, FORM: tl.constexpr, SLICES: tl.constexpr):
    """Reshape scales from `row_scales` so that they broadcast over sums [N, M] or [SLICES, N,
    M]."""
    if FORM.wide == 0:
        scale = tl.trans(scale)
        if SLICES > 1:
            scale = scale[None, :, :]
    return scale


@triton.jit
def bytes_of(start, WIDTH: tl.constexpr, SLICES: tl.constexpr):
    """Return the first byte of each slice of a tile that begins at byte `start`: [], or
    [SLICES]."""
    return start if SLICES == 1 else start + tl.arange(0, SLICES) * WIDTH


@triton.jit
def first_columns(start, begin_low, FORM: tl.constexpr):
    """Return the first low code's column in each slice of the tile that begins at byte `start`.

    begin_low: the same for the tile at byte 0.
    """
    return begin_low + start * FORM.per_code


@triton.jit
def high_columns(low, FORM: tl.constexpr):
    """Return the columns of the high codes in the bytes whose low codes have the columns `low`."""
    if FORM.rest > 0:  # the two halves of a shorter last block are shorter, too
        return low + tl.where(low < FORM.whole, HALF, FORM.rest)
    else:
        return low + HALF


@triton.jit
def in_slices(first, WIDTH: tl.constexpr, SLICES: tl.constexpr):
    """Return WIDTH consecutive indices from each slice's `first` on: [WIDTH], or [SLICES,
    WIDTH]."""
    places = tl.arange(0, WIDTH)
    return first + places if SLICES == 1 else first[:, None] + places[None, :]


@triton.jit
def of_groups(fields_ptr, column, live, FORM: tl.constexpr, SLICES: tl.constexpr):
    """Load scales or zeros, from pointers to rows [N], for the group of each slice's first column:
    [N, 1], or [SLICES, N, 1]."""
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
    """Load the scales, and the zeros or minima, of the groups that columns `column` of a tile
    belong to. The zero is 0 if the form has neither. The scale is 1 if whole rows share a scale;
    that one is applied to the sums at the end."""
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
    """Return `groups_of` for the low codes, and then for the high codes, of the tile that begins at
    byte `start`."""
    column = first_columns(start, begin_low, FORM)
    scale, zero = groups_of(scales_ptr, zeros_ptr, column, live, FORM, SLICES)
    scale_high, zero_high = scale, zero
    if FORM.is_apart:
        column = high_columns(column, FORM)
        scale_high, zero_high = groups_of(scales_ptr, zeros_ptr, column, live, FORM, SLICES)
    return scale, zero, scale_high, zero_high


@triton.jit
def row_scales(scales, live, FORM: tl.constexpr):
    """Load the fp32 scales of whole rows, [1, N], from pointers [N]. Return 1 if rows have several
    scales."""
    scale = 1.0
    if FORM.wide == 0:
        scale = scale_of(tl.load(scales, mask=live, other=0))[None, :]
    return scale


@triton.jit
def row_scaled(sums, scale, FORM: tl.constexpr, dtype: tl.constexpr):
    """Multiply fp32 sums from `stored_sums` by the scales of whole rows, if there are any.

    scale: broadcasts over the sums. dtype: the dtype of x.
    """
    if FORM.wide == 0:
        sums = corrected(sums, FORM, dtype) * scale
    return sums
