"""Weights in the bits of their checkpoint: codes, and scales that groups of them share.

A kind is one entry of `KINDS`. `Stored.plain` is the reference: a product with a stored weight is
the product with its plain form. Does not know files, whose orders of codes end in their readers.
Legend: N features written, K features read; weights of experts are [E, N, K].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Kind(NamedTuple):
    """One way to write numbers as codes.

    codes: the codes' dtype. per_code: numbers in each code, of one row. decode: the numbers
    [..., N, K] of codes [..., N, K / per_code] before zeros and scales, fp32, in a new tensor.
    """

    codes: torch.dtype
    per_code: int
    decode: Callable[[Tensor], Tensor]


KINDS: dict[str, Kind] = {}


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
            numbers -= self._of_each(self.zeros)
        return numbers.mul_(self._of_each(self.scales)).to(dtype)

    def _of_each(self, shared: Tensor) -> Tensor:
        """The groups' values, fp32, in a shape that broadcasts to the numbers."""
        (high, wide), (rows, columns) = self.storage.group, self.shape[-2:]
        found = shared.float()
        if high > 1:
            found = found.repeat_interleave(high, -2)[..., :rows, :]
        return found.repeat_interleave(wide, -1)[..., :columns] if wide > 1 else found

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

    def __getitem__(self, index: int) -> "Stored":
        """A view of one expert's weight."""
        assert self.codes.dim() > 2
        return self._each(lambda field: field[index])

    def to(self, device: torch.device) -> "Stored":
        return self._each(lambda field: field.to(device))

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
        codes, scales, *zeros = (torch.cat(held, -2) for held in zip(*(p.tensors for p in parts)))
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
