"""The load of a run: rates, arrivals and objectives, as its settings hold them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec_cli.core.figures import Rate
from specdec_cli.experiment.load import arrivals
from specdec_cli.recipe.objectives import objective


@dataclass(frozen=True, slots=True)
class Offered:
    """rates: rising, inf last. arrivals: as in the recipe. slo: objectives in milliseconds, by the
    name of their figure."""

    rates: tuple[Rate, ...]
    arrivals: str
    seed: int
    duration_s: float | None
    slo: Mapping[str, float]

    @classmethod
    def of(cls, section: Mapping[str, Any], seed: int) -> "Offered":
        """From the recipe's section `load`."""
        return cls(
            rates=tuple(section["request_rate"]),
            arrivals=section["arrivals"],
            seed=seed,
            duration_s=section["duration_s"],
            slo={f"{name}_ms": objective(name, text) for name, text in section["slo"].items()},
        )

    def num_measured(self, prompts: int, repeats: int, rate: Rate) -> int:
        return arrivals.num_measured(prompts, repeats, rate, self.duration_s)
