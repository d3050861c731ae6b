"""The common part of a sweep's and a comparison's settings.

Imports nothing heavy.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from specdec_cli import text
from specdec_cli.recipe import Recipe, SpeculationSection
from specdec_cli.recipe.choices.registry import is_given

# Run folders of every version have these keys of `speculation`.
_FIRST_KEYS = {
    *("method", "num_speculative_tokens", "acceptance", "ngram_max", "ngram_min"),
    *("synthetic_acceptance_rates", "synthetic_acceptance_length"),
}


def settings_values(recipe: Recipe) -> dict[str, Any]:
    """A recipe as settings hold it: without keys that other settings cover, and without keys that
    folders of earlier versions lack, where they have the value that changes nothing."""
    values = recipe.model_dump(mode="json")
    del values["data"], values["run"]["batch_size"], values["run"]["device"]
    defaults = SpeculationSection().model_dump(mode="json")
    values["speculation"] = {
        key: value
        for key, value in values["speculation"].items()
        if key in _FIRST_KEYS or value != defaults[key]
    }
    return values


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings that samples depend on, as kept in a run folder.

    recipe: as resolved, without the keys that other fields cover.
    """

    recipe: dict[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """The fields that count and are written."""
        return asdict(self)

    @property
    def digest(self) -> str:
        return text.digest(self.values)

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
        found: dict[str, Any] = json.loads(json.dumps(self.values))
        return found
