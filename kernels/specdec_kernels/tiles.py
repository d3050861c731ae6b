"""Finds launch configurations in tables, one table per compute capability. The cases of a table are
tried in order, and the first one that fits a problem's sizes is used."""

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from specdec_kernels.gpu import CAPABILITY

T = TypeVar("T")


class Case(NamedTuple, Generic[T]):
    """A launch configuration, and the problems for which it may be used.

    tiles: the launch configuration.
    most: upper limits for some of a problem's sizes, in the order in which `fits` takes them.
    least: lower limits for other sizes, also in that order.
    """

    tiles: T
    most: tuple[float, ...]
    least: tuple[float, ...] = ()

    def fits(self, most: tuple[float, ...], least: tuple[float, ...]) -> bool:
        return all(n <= limit for n, limit in zip(most, self.most, strict=True)) and all(
            n >= limit for n, limit in zip(least, self.least, strict=True)
        )


def first_fit(
    cases: Sequence[Case[T]], most: tuple[float, ...], least: tuple[float, ...] = ()
) -> T | None:
    """Return the tiles of the first case that fits a problem's sizes, or None if no case fits."""
    return next((case.tiles for case in cases if case.fits(most, least)), None)


def table_for(tables: Mapping[tuple[int, int], T], device: tuple[int, int]) -> T:
    """Return the table for a compute capability, or the H200's table if there is none for it."""
    return tables.get(device, tables[CAPABILITY])
