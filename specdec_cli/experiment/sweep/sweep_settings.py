"""The settings of a sweep. Knows no models and no prompts' text."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from specdec_cli.experiment.run_settings import RunSettings


@dataclass(frozen=True, slots=True)
class SweepSettings(RunSettings):
    """The settings that samples depend on; folders with equal settings may be merged.

    prompts: how many, and digests of their tokens and categories. shard: place and number of
    shards, or None.
    """

    drafts: tuple[str | None, ...]
    ks: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    predict_only: bool
    prompts: dict[str, Any]
    shard: tuple[int, int] | None
    device: str
    dtype: str

    @property
    def measured_ks(self) -> tuple[int, ...]:
        return (0, max(self.ks)) if self.predict_only and max(self.ks) else self.ks

    @property
    def blocks(self) -> list[tuple[str | None, int]]:
        """Drafts and batch sizes in measuring order."""
        return list(product(self.drafts, self.batch_sizes))

    @classmethod
    def of_dict(cls, found: Mapping[str, Any]) -> "SweepSettings":
        """From `as_dict`. Raises `KeyError` or `TypeError` for other fields than a sweep's."""
        values = dict(found)
        for name in ("drafts", "ks", "batch_sizes"):
            values[name] = tuple(values[name])
        values["shard"] = tuple(values["shard"]) if values["shard"] else None
        return cls(**values)
