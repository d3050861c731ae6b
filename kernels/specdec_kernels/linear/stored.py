"""Weights in the bits of their checkpoint: codes, and scales that groups of them share.

A kind is one entry of `KINDS`. `Stored.plain` is the reference: a product with a stored weight is
the product with its plain form. Does not know files, whose orders of codes end in their readers.
Legend: N features written, K features read; weights of experts are [E, N, K].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Kind(NamedTuple):
    """One way to write numbers as codes.

    codes: the codes' dtype. per_code: numbers in each code, of one row. decode: the numbers
    [..., N, K] of codes [..., N, K / per_code] before zeros and scales, fp32, in a new tensor.
    encode: the codes of fp32 numbers of which none is greater than `largest` in magnitude.
    """

    codes: torch.dtype
    per_code: int
    decode: Callable[[Tensor], Tensor]
    encode: Callable[[Tensor], Tensor]
    largest: float


FP8 = "fp8"
KINDS = {
    FP8: Kind(
        *(torch.float8_e4m3fn, 1, lambda codes: codes.float()),
        *(lambda numbers: numbers.clamp(-448, 448).to(torch.float8_e4m3fn), 448.0),
    )
}


@dataclass(frozen=True, slots=True)
class Storage:
    """The form of a stored weight, known without its numbers.

    kind: a name in `KINDS`. group: rows and columns of the numbers that share a scale; 0 columns
    are all of a row. The last group of a row or column may be smaller. has_zeros: groups have a
    number, uint8, that is subtracted from their decoded codes.
    """

    kind: str
    group: tuple[int, int] = (1, 0)
    has_zeros: bool = False

    def codes_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the codes of a weight of `shape`."""
        return (*shape[:-1], shape[-1] // KINDS[self.kind].per_code)

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scales, and of the zeros, of a weight of `shape`."""
        *outer, rows, columns = shape
        high, wide = self.group
        return (*outer, -(-rows // high), -(-columns // wide) if wide else 1)

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a weight of `shape`."""
        codes = torch.Size(self.codes_shape(shape)).numel() * KINDS[self.kind].codes.itemsize
        return codes + torch.Size(self.scales_shape(shape)).numel() * (4 + self.has_zeros)

    def numbers_of_code(self, dim: int) -> int:
        """Rows (`dim` -2) or columns (-1) of the numbers in one code."""
        return KINDS[self.kind].per_code if dim == -1 else 1

    def can_cut(self, dim: int, place: int, size: int) -> bool:
        """Whether rows (`dim` -2) or columns (-1) of a weight, of which there are `size`, can be
        cut before entry `place`. Groups and codes stay whole."""
        units = self.group[dim] or 1, self.numbers_of_code(dim)
        return place == size or not any(place % unit for unit in units)

    def of_each(self, shared: Tensor, shape: Sequence[int]) -> Tensor:
        """Values of the groups of a weight of `shape`, shaped to broadcast to its numbers."""
        (high, wide), (rows, columns) = self.group, shape[-2:]
        if high > 1:
            shared = shared.repeat_interleave(high, -2)[..., :rows, :]
        return shared.repeat_interleave(wide, -1)[..., :columns] if wide > 1 else shared

    def quantised(self, numbers: Tensor) -> "Stored":
        """Numbers [..., N, K] in this form; the largest of a group has the largest code."""
        assert not self.has_zeros
        kind, (high, wide), (rows, columns) = KINDS[self.kind], self.group, numbers.shape[-2:]
        wide = wide or columns
        most = F.pad(numbers.float().abs(), (0, -columns % wide, 0, -rows % high))
        most = most.unflatten(-1, (-1, wide)).unflatten(-3, (-1, high)).amax((-3, -1))
        scales = (most / kind.largest).clamp_(min=torch.finfo(torch.float32).tiny)
        codes = kind.encode(numbers.float() / self.of_each(scales, numbers.shape))
        return Stored(codes, scales, None, self)


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight [..., N, K] that products read as it lies; see `Storage` for the shapes.

    codes: of the kind's dtype. scales: fp32. zeros: uint8, or None.
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
        """The numbers, [..., N, K], contiguous; they are rounded once, to `dtype`."""
        numbers = KINDS[self.storage.kind].decode(self.codes)
        if self.zeros is not None:
            numbers.sub_(self.storage.of_each(self.zeros, self.shape))
        return numbers.mul_(self.storage.of_each(self.scales, self.shape)).to(dtype)

    def rows(self, start: int, stop: int) -> "Stored":
        """A view of the rows start..stop. Raises `ValueError` for a cut through a group."""
        return self._cut(-2, start, stop)

    def columns(self, start: int, stop: int) -> "Stored":
        """A view of the columns start..stop. Raises `ValueError` for a cut through a group."""
        return self._cut(-1, start, stop)

    def _cut(self, dim: int, start: int, stop: int) -> "Stored":
        size = self.shape[dim]
        if not all(self.storage.can_cut(dim, place, size) for place in (start, stop)):
            raise ValueError(f"{start}..{stop} of {size} cuts through a group")

        def part(field: Tensor) -> Tensor:
            storage = self.storage
            unit = storage.numbers_of_code(dim) if field is self.codes else storage.group[dim]
            if not unit:
                return field
            return field.narrow(dim, start // unit, -(-stop // unit) - start // unit)

        return self._each(part)

    def reordered(self, order: Tensor) -> "Stored":
        """The rows in another order within each run of them.

        order: int64 [P], the place of each row of a run of P rows before.
        """
        part = self if self.storage.group[0] % len(order) == 0 else self._by_rows()
        places = torch.arange(self.shape[-2], device=order.device)
        places = places.view(-1, len(order))[:, order].flatten()

        def moved(field: Tensor) -> Tensor:
            stays = field is not part.codes and part.storage.group[0] > 1
            return field if stays else field.index_select(-2, places)

        return part._each(moved)

    def __getitem__(self, index: int) -> "Stored":
        """A view of one expert's weight."""
        assert self.codes.dim() > 2
        return self._each(lambda field: field[index])

    def copied(self, device: torch.device) -> "Stored":
        """A contiguous copy on `device`."""
        return self._each(lambda field: field.to(device, copy=True).contiguous())

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Stored":
        zeros = None if self.zeros is None else change(self.zeros)
        return Stored(change(self.codes), change(self.scales), zeros, self.storage)

    @staticmethod
    def joined(parts: Sequence["Stored"]) -> "Stored":
        """One weight of the rows of all, which have one storage.

        Where a part ends within a group of rows, each row gets scales of its own.
        """
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
    """A weight's numbers; of a tensor, itself."""
    return weight if isinstance(weight, Tensor) else weight.plain(dtype)
