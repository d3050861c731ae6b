"""The settings of a sweep. Knows no models and no prompts' text."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specdec_cli.core.figures import Record
from specdec_cli.experiment.folders.records import Key
from specdec_cli.experiment.folders.run_settings import RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings(RunSettings):
    """The settings of a sweep; folders with equal settings may be merged.

    drafts: the names of the arms. shard: place and number of shards, or None.
    """

    drafts: tuple[str | None, ...]
    ks: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    predict_only: bool
    shard: tuple[int, int] | None

    @property
    def shares_baseline(self) -> bool:
        """Whether all arms have one k = 0, whose records name no draft; a single arm's goes by its
        name."""
        return len(self.drafts) > 1

    @property
    def measured_ks(self) -> tuple[int, ...]:
        return (0, max(self.ks)) if self.predict_only and max(self.ks) else self.ks

    def key(self, draft: str | None, batch_size: int, k: int) -> Key:
        """The point of an arm at a k."""
        return Key(None if self.shares_baseline and k == 0 else draft, batch_size, k)

    def keys(self, batch_size: int, ks: Iterable[int]) -> list[Key]:
        """The points of one batch size: each arm's in turn, what all arms share once and first."""
        chosen = list(ks)
        found = (self.key(d, batch_size, k) for d in self.drafts for k in chosen)
        return list(dict.fromkeys(found))

    @property
    def measured_keys(self) -> list[Key]:
        """All points that are measured, not predicted."""
        return [key for b in self.batch_sizes for key in self.keys(b, self.measured_ks)]

    def misfit(self, record: Record) -> str | None:
        is_baseline = self.shares_baseline and getattr(record, "k", None) == 0
        drafts = (None,) if is_baseline else self.drafts
        return self.misfit_in(record, draft=drafts, k=self.ks, batch_size=self.batch_sizes)

    @classmethod
    def of_dict(cls, found: Mapping[str, Any]) -> "SweepSettings":
        """From `as_dict`. Raises `KeyError` or `TypeError` for other fields than a sweep's."""
        values = dict(found)
        for name in ("drafts", "ks", "batch_sizes"):
            values[name] = tuple(values[name])
        values["shard"] = tuple(values["shard"]) if values["shard"] else None
        return cls(**values)
