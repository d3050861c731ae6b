"""Addresses of a stored weight's codes, scales and zeros, for kernels that decode them in
registers. Each slice of a tile is in one group of columns.
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
    """A weight's storage as constants of the kernel."""

    kind: str
    per_code: int  # values per byte
    high: int  # rows that share a scale
    wide: int  # columns that share a scale; 0 if a whole row does
    groups: int  # groups of columns in a row
    has_zeros: bool  # or minima
    has_minima: bool
    is_apart: bool  # whether the two numbers of a byte may have different scales, or have minima
    whole: int  # columns before a shorter last block
    rest: int  # columns between the two numbers of a byte of the last block

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
    """The constants of a stored weight, which may be on meta; None for a plain one."""
    return None if isinstance(weight, Tensor) else Form.of(weight)


def operands_of(weight: Tensor | Stored) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A weight, or a stored weight's codes as bytes, scales and zeros, all contiguous."""
    if isinstance(weight, Tensor):
        assert weight.is_contiguous()
        return weight, None, None
    assert all(field.is_contiguous() for field in weight.tensors)
    return weight.codes.view(torch.uint8), weight.scales, weight.zeros


@triton.jit
def rows_of(codes_ptr, scales_ptr, zeros_ptr, row, K: tl.constexpr, FORM: tl.constexpr):
    """Pointers to the codes, scales and zeros of rows [N] with K numbers each. Rows are counted
    through all experts, and groups do not cross the borders of experts.
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
    """Scales from `row_scales` in a shape that broadcasts over sums [N, M] or [SLICES, N, M]."""
    if FORM.wide == 0:
        scale = tl.trans(scale)
        if SLICES > 1:
            scale = scale[None, :, :]
    return scale


@triton.jit
def bytes_of(start, WIDTH: tl.constexpr, SLICES: tl.constexpr):
    """The first byte of each slice of a tile that begins at byte `start`: [], or [SLICES]."""
    return start if SLICES == 1 else start + tl.arange(0, SLICES) * WIDTH


@triton.jit
def first_columns(start, begin_low, FORM: tl.constexpr):
    """The first column, of low codes, of each slice of the tile that begins at byte `start`.

    begin_low: the first column of the tile at byte 0.
    """
    return begin_low + start * FORM.per_code


@triton.jit
def high_columns(low, FORM: tl.constexpr):
    """The columns of the high codes in the bytes whose low codes have the columns `low`."""
    if FORM.rest > 0:  # a last block that is shorter has two halves as well
        return low + tl.where(low < FORM.whole, HALF, FORM.rest)
    else:
        return low + HALF


@triton.jit
def in_slices(first, WIDTH: tl.constexpr, SLICES: tl.constexpr):
    """WIDTH places from each of `first` on: [WIDTH], or [SLICES, WIDTH]."""
    places = tl.arange(0, WIDTH)
    return first + places if SLICES == 1 else first[:, None] + places[None, :]


@triton.jit
def of_groups(fields_ptr, column, live, FORM: tl.constexpr, SLICES: tl.constexpr):
    """Scales or zeros from pointers to rows [N], for the groups of each slice's first column: [N,
    1], or [SLICES, N, 1]."""
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
    """The scales and the zeros, or minima, of the groups to which columns `column` of a tile
    belong. The zero is 0 if the form has none. The scale is 1 if whole rows share one, which
    multiplies the sums at the end."""
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
    """The results of `groups_of` for the low and for the high codes of the tile that begins at byte
    `start`."""
    column = first_columns(start, begin_low, FORM)
    scale, zero = groups_of(scales_ptr, zeros_ptr, column, live, FORM, SLICES)
    scale_high, zero_high = scale, zero
    if FORM.is_apart:
        column = high_columns(column, FORM)
        scale_high, zero_high = groups_of(scales_ptr, zeros_ptr, column, live, FORM, SLICES)
    return scale, zero, scale_high, zero_high


@triton.jit
def row_scales(scales, live, FORM: tl.constexpr):
    """[1, N] fp32 scales of whole rows, from pointers [N]; 1 if groups of columns have scales."""
    scale = 1.0
    if FORM.wide == 0:
        scale = scale_of(tl.load(scales, mask=live, other=0))[None, :]
    return scale


@triton.jit
def row_scaled(sums, scale, FORM: tl.constexpr, dtype: tl.constexpr):
    """fp32 sums from `stored_sums`, of x in `dtype`, times the scales of rows, which broadcast over
    them."""
    if FORM.wide == 0:
        sums = corrected(sums, FORM, dtype) * scale
    return sums
