"""Tables of launch configurations, one per device; the first fitting case is used."""

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from specdec_kernels.gpu import CAPABILITY

T = TypeVar("T")


class Case(NamedTuple, Generic[T]):
    """Tiles, and the problems that use them: upper limits of some sizes, lower limits of others."""

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
    """The tiles of the first case that fits a problem's sizes; None without one."""
    return next((case.tiles for case in cases if case.fits(most, least)), None)


def table_for(tables: Mapping[tuple[int, int], T], device: tuple[int, int]) -> T:
    """The table of a compute capability; devices without one use an H200's."""
    return tables.get(device, tables[CAPABILITY])
