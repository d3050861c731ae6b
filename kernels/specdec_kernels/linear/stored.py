"""Weights in their checkpoint's quantised form: codes, and scales that groups of values share.

`KINDS` lists the encodings. `Stored.plain` is the reference implementation of decoding. Checkpoint
formats order their codes differently, so the reader of each format converts them to the order used
here.

Legend: N is the number of output features, and K is the number of input features. The weights of E
experts form one tensor [E, N, K].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Kind(NamedTuple):
    """One way to encode values.

    codes: the dtype that holds the codes.
    per_code: how many values one element of that dtype holds.
    decode: converts codes [..., N, K / per_code] to a new tensor of fp32 values [..., N, K]. It
        does not apply zeros and scales.
    encode: converts fp32 values to the nearest codes; the inverse of `decode`.
    largest: the magnitude to which `Storage.quantised` scales the largest number of a group.
    middle: subtracted from decoded values if a weight has neither zeros nor minima.
    block: the number of adjacent columns whose codes are interleaved; 1 if none are.
    """

    codes: torch.dtype
    per_code: int
    decode: Callable[[Tensor], Tensor]
    encode: Callable[[Tensor], Tensor]
    largest: float
    middle: float = 0.0
    block: int = 1


def unpacked(codes: Tensor) -> Tensor:
    """Unpack bytes [..., K / 2] into numbers 0..15, uint8 [..., K].

    In each block of 128 columns, the low four bits of byte j hold column j, and the high four bits
    hold column j + 64. If K is not a multiple of 128, the remaining columns form a shorter block.
    Their number R is always even, and byte j holds columns j and j + R / 2.
    """
    parts = [torch.cat((b & 15, b >> 4), -1).flatten(-2) for b in _blocks(codes, BLOCK // 2)]
    return torch.cat(parts, -1)


def packed(numbers: Tensor) -> Tensor:
    """Pack numbers 0..15, uint8 [..., K], into bytes [..., K / 2]; see `unpacked`."""
    halves = [block.chunk(2, -1) for block in _blocks(numbers, BLOCK)]
    return torch.cat([(low | high << 4).flatten(-2) for low, high in halves], -1)


def _blocks(tensor: Tensor, width: int) -> list[Tensor]:
    """Split the last dimension into blocks [..., B, width] and a remainder [..., 1, R]. Leave out
    whichever is empty."""
    count = tensor.shape[-1] // width
    whole, rest = tensor[..., : count * width], tensor[..., count * width :]
    found = [whole.unflatten(-1, (count, width)), rest.unsqueeze(-2)]
    return [block for block in found if block.shape[-2:].numel()]


def _to_tiles(rows: Tensor, wide: int) -> Tensor:
    """Put rows [R, W] in the order of `Stored.tiled`. wide: elements of a row in a block."""
    whole = rows.shape[1] // wide * wide
    runs = rows.view(-1, TILE_ROWS, rows.shape[1])
    blocks = runs[:, :, :whole].unflatten(2, (-1, wide)).transpose(1, 2)
    return torch.cat((blocks.flatten(1), runs[:, :, whole:].flatten(1)), 1)


def _from_tiles(rows: Tensor, wide: int) -> Tensor:
    """The inverse of `_to_tiles`."""
    whole = rows.shape[1] // wide * wide
    blocks, rest = rows.view(-1, TILE_ROWS * rows.shape[1]).tensor_split([TILE_ROWS * whole], 1)
    blocks = blocks.view(len(blocks), -1, TILE_ROWS, wide).transpose(1, 2).flatten(2)
    return torch.cat((blocks, rest.view(len(rest), TILE_ROWS, -1)), 2)


def _from_e2m1(codes: Tensor) -> Tensor:
    numbers = torch.tensor([*E2M1, *(-n for n in E2M1)], device=codes.device)
    return numbers[unpacked(codes).int()]


def _to_e2m1(numbers: Tensor) -> Tensor:
    halfway = [(low + high) / 2 for low, high in pairwise(E2M1)]
    codes = torch.bucketize(numbers.abs(), torch.tensor(halfway, device=numbers.device))
    return packed((codes + 8 * numbers.signbit()).to(torch.uint8))


FP8, INT4, INT8, MXFP4 = "fp8", "int4", "int8", "mxfp4"
BLOCK = 128  # columns per block of interleaved four-bit codes
TILE_ROWS = 32  # rows per tile of `Stored.tiled`
LARGEST_POWER = 160  # largest exponent of a scale in mxfp4, plus 127, by which kernels multiply
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of codes 0..7; 8..15 are their negatives
KINDS = {
    FP8: Kind(
        *(torch.float8_e4m3fn, 1, lambda codes: codes.float()),
        *(lambda numbers: numbers.clamp(-448, 448).to(torch.float8_e4m3fn), 448.0),
    ),
    INT4: Kind(
        codes=torch.uint8,
        per_code=2,
        decode=lambda codes: unpacked(codes).float(),
        encode=lambda numbers: packed(numbers.round().clamp(0, 15).to(torch.uint8)),
        largest=7.0,
        middle=8.0,
        block=BLOCK,
    ),
    INT8: Kind(
        *(torch.int8, 1, lambda codes: codes.float()),
        *(lambda numbers: numbers.round().clamp(-128, 127).to(torch.int8), 127.0),
    ),
    MXFP4: Kind(torch.uint8, 2, _from_e2m1, _to_e2m1, 6.0, block=BLOCK),
}


@dataclass(frozen=True, slots=True)
class Storage:
    """The format of a quantised weight, without its values.

    kind: a name in `KINDS`.
    group: (rows, columns), the size of a group of values that share a scale; 0 columns mean that
        groups span whole rows. The last group of a row or column may be smaller.
    has_zeros: whether each group has a zero point, called zero for short, which is subtracted from
        its decoded codes. Zeros are int8 for int8 codes, and uint8 otherwise.
    scales: the dtype of the scales: fp32, fp16 or bf16, or uint8 for powers of two. A uint8 is the
        exponent plus 127 (e8m0 of https://arxiv.org/abs/2310.10537, which has no zero and no sign;
        255 is NaN).
    has_minima: whether each group has a minimum instead of a zero. Minima have the dtype of the
        scales, and are subtracted after codes are multiplied by scales.
    is_tiled: whether codes and scales are in the order of `Stored.tiled`.
    """

    kind: str
    group: tuple[int, int] = (1, 0)
    has_zeros: bool = False
    scales: torch.dtype = torch.float32
    has_minima: bool = False
    is_tiled: bool = False

    @property
    def is_apart(self) -> bool:
        """True if kernels must scale the low and high codes of bytes separately.

        This is necessary if the two values of a byte may have different scales. It is also
        necessary if the weight has minima, because matmul kernels do not subtract minima when they
        scale both codes together.
        """
        return KINDS[self.kind].per_code > 1 and (self.group[1] % BLOCK > 0 or self.has_minima)

    def codes_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the codes of a weight of `shape`."""
        return (*shape[:-1], shape[-1] // KINDS[self.kind].per_code)

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales, and of zeros or minima, of a weight of `shape`."""
        *outer, rows, columns = shape
        high, wide = self.group
        return (*outer, -(-rows // high), -(-columns // wide) if wide else 1)

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the size in bytes of a weight of `shape`, including scales, zeros and minima."""
        codes = torch.Size(self.codes_shape(shape)).numel() * KINDS[self.kind].codes.itemsize
        of_group = self.scales.itemsize * (1 + self.has_minima) + self.has_zeros
        return codes + torch.Size(self.scales_shape(shape)).numel() * of_group

    def on_meta(self, shape: Sequence[int]) -> "Stored":
        """Return a weight of `shape` on the meta device, which has no values."""
        dtype, zeros = KINDS[self.kind].codes, None
        codes = torch.empty(self.codes_shape(shape), dtype=dtype, device="meta")
        scales = torch.empty(self.scales_shape(shape), dtype=self.scales, device="meta")
        if self.has_minima or self.has_zeros:
            zeros = scales if self.has_minima else scales.to(dtype)
        return Stored(codes, scales, zeros, self)

    def numbers_of_code(self, dim: int) -> int:
        """Return how many rows (`dim` -2) or columns (-1) one element of the codes holds."""
        return KINDS[self.kind].per_code if dim == -1 else 1

    def can_cut(self, dim: int, place: int, size: int) -> bool:
        """Return whether a weight of `size` rows (`dim` -2) or columns (-1) can be cut before index
        `place` without cutting through a group or a code."""
        units = self.group[dim] or 1, self.numbers_of_code(dim)
        return place == size or not any(place % unit for unit in units)

    def of_each(self, shared: Tensor, shape: Sequence[int]) -> Tensor:
        """Repeat values that groups share, such as scales, so that they broadcast to a weight of
        `shape`."""
        (high, wide), (rows, columns) = self.group, shape[-2:]
        if high > 1:
            shared = shared.repeat_interleave(high, -2)[..., :rows, :]
        return shared.repeat_interleave(wide, -1)[..., :columns] if wide > 1 else shared

    def factors(self, scales: Tensor) -> Tensor:
        """Decode scales to fp32."""
        powers = self.scales == torch.uint8
        return scales.view(torch.float8_e8m0fnu).float() if powers else scales.float()

    def quantised(self, numbers: Tensor) -> "Stored":
        """Quantise numbers [..., N, K] to this format.

        The scale of each group is chosen so that the group's largest magnitude becomes the kind's
        `largest`. Scales that must be powers of two are rounded up, so the largest magnitude may
        become as small as half of `largest`. If the format has zeros or minima, they are not fitted
        to the numbers. Their only effect is to subtract the kind's `middle` from the codes.
        """
        kind, (high, wide), (rows, columns) = KINDS[self.kind], self.group, numbers.shape[-2:]
        wide = wide or columns
        most = F.pad(numbers.float().abs(), (0, -columns % wide, 0, -rows % high))
        most = most.unflatten(-1, (-1, wide)).unflatten(-3, (-1, high)).amax((-3, -1))
        powers = self.scales == torch.uint8
        least = torch.finfo(torch.float32 if powers else self.scales).tiny
        scales = (most / kind.largest).clamp_(min=least)
        scales = (scales.log2().ceil() + 127 if powers else scales).to(self.scales)
        found = numbers / self.of_each(self.factors(scales), numbers.shape)
        shift = torch.full_like(scales, kind.middle, dtype=kind.codes) if self.has_zeros else None
        if self.has_minima:
            shift = scales * kind.middle
        return Stored(kind.encode(found.add_(kind.middle)), scales, shift, self)


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight [..., N, K] in the quantised form that matmuls read.

    `storage` determines the shapes and dtypes of the other fields. `zeros` holds the zeros or
    minima of the groups, and is None if the format has neither.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    storage: Storage

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, width = self.codes.shape
        return (*outer, width * KINDS[self.storage.kind].per_code)

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.codes, self.scales, self.zeros) if t is not None]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised values [..., N, K], contiguous. They are computed in fp32 and
        rounded to `dtype`."""
        if self.storage.is_tiled:
            return self._moved(_from_tiles, is_tiled=False).plain(dtype)
        kind, factors = KINDS[self.storage.kind], self.storage.factors(self.scales)
        numbers = kind.decode(self.codes)
        shift: Tensor | float = kind.middle
        if self.zeros is not None:
            shift = self.storage.of_each(self.zeros, self.shape)
        if not self.storage.has_minima and (kind.middle or self.storage.has_zeros):
            numbers.sub_(shift)
        numbers.mul_(self.storage.of_each(factors, self.shape))
        if self.storage.has_minima:
            numbers.sub_(shift)
        return numbers.to(dtype)

    def rows(self, start: int, stop: int) -> "Stored":
        """Return a view of the rows start..stop. Raises `ValueError` if this splits a group."""
        return self._cut(-2, start, stop)

    def columns(self, start: int, stop: int) -> "Stored":
        """Return a view of the columns start..stop, or a copy if the range splits a block of
        interleaved codes. Raises `ValueError` if it splits a group or a packed byte."""
        return self._cut(-1, start, stop)

    def _cut(self, dim: int, start: int, stop: int) -> "Stored":
        assert not self.storage.is_tiled
        size = self.shape[dim]
        if not all(self.storage.can_cut(dim, place, size) for place in (start, stop)):
            raise ValueError(
                f"the range {start}..{stop} of {size} splits a quantisation group or a packed byte"
            )
        storage, kind = self.storage, KINDS[self.storage.kind]
        cuts_block = dim == -1 and any(p % kind.block and p != size for p in (start, stop))

        def part(field: Tensor) -> Tensor:
            if field is self.codes and cuts_block:
                return kind.encode(kind.decode(field)[..., start:stop])
            unit = storage.numbers_of_code(dim) if field is self.codes else storage.group[dim]
            if not unit:
                return field
            return field.narrow(dim, start // unit, -(-stop // unit) - start // unit)

        return self._each(part)

    def reordered(self, order: Tensor) -> "Stored":
        """Reorder the rows within each run of P consecutive rows. If groups do not consist of whole
        runs, rows may move to another group, so each row of the result gets its own scales.

        order: int64 [P]. Row i of each run is taken from row order[i] of the same run.
        """
        part = self if self.storage.group[0] % len(order) == 0 else self._by_rows()
        places = torch.arange(self.shape[-2], device=order.device)
        places = places.view(-1, len(order))[:, order].flatten()

        def moved(field: Tensor) -> Tensor:
            stays = field is not part.codes and part.storage.group[0] > 1
            return field if stays else field.index_select(-2, places)

        return part._each(moved)

    def __getitem__(self, index: int) -> "Stored":
        """Return a view of one expert's weight."""
        assert self.codes.dim() > 2
        return self._each(lambda field: field[index])

    def tiled(self) -> "Stored":
        """Return a copy in the order in which kernels read the weights of experts.

        The rows of all experts are cut into runs of 32, and their columns into blocks of 128, the
        last of which may be shorter. The codes of a run and a block lie together, row by row, and
        so do their scales. The fields keep their shapes. Only `plain` and the kernels of experts
        read such a weight, and it can be cut only between experts.
        """
        assert self.storage.group[0] == 1 and self.zeros is None
        return self._moved(_to_tiles, is_tiled=True)

    def _moved(self, move: Callable[[Tensor, int], Tensor], *, is_tiled: bool) -> "Stored":
        units = self.storage.numbers_of_code(-1), self.storage.group[1]
        codes, scales = (
            move(field.flatten(0, -2), BLOCK // unit).view(field.shape)
            for field, unit in zip((self.codes, self.scales), units, strict=True)
        )
        return Stored(codes, scales, None, replace(self.storage, is_tiled=is_tiled))

    def copied(self, device: torch.device) -> "Stored":
        """Return a contiguous copy on `device`."""
        return self._each(lambda field: field.to(device, copy=True).contiguous())

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Stored":
        zeros = None if self.zeros is None else change(self.zeros)
        return Stored(change(self.codes), change(self.scales), zeros, self.storage)

    @staticmethod
    def joined(parts: Sequence["Stored"]) -> "Stored":
        """Concatenate weights of the same format along their rows. If a weight other than the last
        ends with an incomplete group of rows, the groups of the result would differ in size, so
        each row of the result gets its own scales instead."""
        assert len({part.storage for part in parts}) == 1
        high = parts[0].storage.group[0]
        if any(part.shape[-2] % high for part in parts[:-1]):
            parts = [part._by_rows() for part in parts]
        fields = [part.tensors for part in parts]
        codes, scales, *zeros = (torch.cat(held, -2) for held in zip(*fields, strict=True))
        return Stored(codes, scales, zeros[0] if zeros else None, parts[0].storage)

    def _by_rows(self) -> "Stored":
        high, wide = self.storage.group
        rows = self.shape[-2]

        def spread(field: Tensor) -> Tensor:
            if field is self.codes:
                return field
            return field.repeat_interleave(high, -2)[..., :rows, :]

        return replace(self._each(spread), storage=replace(self.storage, group=(1, wide)))


def plain_of(weight: Tensor | Stored, dtype: torch.dtype) -> Tensor:
    """Return the dequantised values of a weight, or the weight itself if it is not quantised."""
    return weight if isinstance(weight, Tensor) else weight.plain(dtype)
