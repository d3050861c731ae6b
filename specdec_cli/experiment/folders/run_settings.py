"""The common part of the settings of all runs that keep records.

Imports nothing heavy.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from specdec_cli import text
from specdec_cli.core.figures import Record
from specdec_cli.experiment.folders.records import Sample, elsewhere, not_measured
from specdec_cli.recipe.choices.registry import is_given


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings that samples depend on, as kept in a run folder; a resumed run must have the
    same.

    kind: of run, in words. mark: a field that only settings of this kind have. recipe: as resolved,
    without the keys that other fields cover. prompts: how many, and digests
    of their tokens and categories. device: the name of its kind. dtype: the target's.
    """

    kind: ClassVar[str]
    mark: ClassVar[str]
    recipe: dict[str, Any]
    prompts: dict[str, Any]
    device: str
    dtype: str

    @property
    def digest(self) -> str:
        return text.digest(asdict(self))

    @property
    def seed(self) -> int:
        return int(self.recipe["run"]["seed"])

    @property
    def repeats(self) -> int:
        return int(self.recipe["run"]["repeats"])

    @property
    def is_greedy(self) -> bool:
        return bool(self.recipe["sampling"]["temperature"] == 0.0)

    @property
    def has_given_acceptance(self) -> bool:
        return is_given(self.recipe["speculation"]["acceptance"])

    def as_dict(self) -> dict[str, Any]:
        """The settings as read back from JSON: with lists for tuples."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    def in_document(self) -> dict[str, Any]:
        """The settings as documents have them."""
        return self.as_dict() | {"settings_hash": self.digest}

    def misfit_in(self, record: Record, **known: Collection[Any]) -> str | None:
        """The reason that a record is of no point of the run, or None.

        known: the values that its fields may have.
        """
        told = elsewhere(record, known)
        if told or not isinstance(record, Sample):
            return told
        return not_measured(record, self.prompts["count"], self.repeats)
