"""Repeats that do not count, and when they cast doubt on those that do. Knows no notices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from specdec_cli.experiment.folders.records import Key, Sample
from specdec_cli.experiment.folders.samples import Samples
from specdec_cli.experiment.statistics.repeats import usual_repeats

# Seconds that a system at rest takes from a process now and then. In recorded quiet sweeps on a
# virtual machine of two processors the longest outlier lost 0.19 s.
_SLICE = 0.25
_WEIGHT = 0.01  # least share of a point's time
# Share of the repeats that are outliers on a system at rest: 0 to 1.4 % in those sweeps. If they
# were independent, two repeats of one prompt would both be outliers in 4 of 10,000 prompts.
_SELDOM = 0.02
_CHANCE = 0.001  # that so many are found where the share is `_SELDOM`


@dataclass(frozen=True, slots=True)
class Outlier:
    """A repeat that took far longer than the fastest one of its prompt.

    lost: seconds that the disturbance took, from all prompts that are decoded together.
    """

    lost: float
    key: Key
    sample: Sample


@dataclass(frozen=True, slots=True)
class Outliers:
    """The outliers of some points. repeats: of all prompts, outliers or not.

    disturbances, chances: outliers and repeats, with prompts that are decoded together as one.
    """

    found: list[Outlier]
    repeats: int
    disturbances: float
    chances: float
    seconds: Mapping[Key, float]

    @classmethod
    def of(cls, samples: Mapping[Key, Samples]) -> "Outliers":
        found, repeats, disturbances, chances = list[Outlier](), 0, 0.0, 0.0
        for key, of in samples.items():
            together = min(key.batch_size, len(of))
            for sample in of.values():
                times = sample.decode_seconds
                usual = usual_repeats(times)
                lost = [t - min(times) for place, t in enumerate(times) if place not in usual]
                found += [Outlier(together * value, key, sample) for value in lost]
                repeats += len(times)
                disturbances += len(lost) / together
                chances += len(times) / together
        seconds = {
            key: sum(sum(s.decode_seconds) for s in of.values()) for key, of in samples.items()
        }
        return cls(found, repeats, disturbances, chances, seconds)

    @property
    def worst(self) -> Outlier:
        return max(self.found, key=lambda one: one.lost)

    @property
    def are_long(self) -> bool:
        """Whether one lost more than a slice.

        What lasts longer may have met its neighbours too, and slowed them too little to tell.
        """
        return any(one.lost > max(_SLICE, _WEIGHT * self.seconds[one.key]) for one in self.found)

    @property
    def are_many(self) -> bool:
        """Whether they are more than a system at rest has, so that all repeats of a prompt may be
        disturbed.

        By the bound of Chernoff and Hoeffding on a binomial's tail: n repeats, of which each is an
        outlier with probability p, have a share of s or more with at most exp(-n KL(s, p)).
        """
        share, rate = self.disturbances / max(self.chances, 1e-9), _SELDOM
        if share <= rate:
            return False
        divergence = share * math.log(share / rate)
        if share < 1.0:
            divergence += (1 - share) * math.log((1 - share) / (1 - rate))
        return self.chances * divergence > -math.log(_CHANCE)
