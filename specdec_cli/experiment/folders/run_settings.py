"""The common part of a sweep's and a comparison's settings.

Imports nothing heavy.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from specdec_cli import text
from specdec_cli.recipe import Recipe
from specdec_cli.recipe.choices.registry import is_given


def settings_values(recipe: Recipe) -> dict[str, Any]:
    """A recipe as settings hold it: without keys that other settings cover."""
    values = recipe.model_dump(mode="json")
    del values["data"], values["run"]["batch_size"], values["run"]["device"]
    return values


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings that samples depend on, as kept in a run folder.

    recipe: as resolved, without the keys that other fields cover.
    """

    recipe: dict[str, Any]

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
