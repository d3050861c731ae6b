"""Finds outlying repeats, which are left out of the results, and tells whether they cast doubt on
the other repeats."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from specdec_cli.experiment.folders.records import Key, Sample, usual_repeats
from specdec_cli.experiment.folders.samples import Samples

# How many seconds a process may occasionally be held up on an idle system. In sweeps that were
# recorded on a quiet virtual machine with two processors, the longest outlier lost 0.19 s.
_SLICE = 0.25
_WEIGHT = 0.01  # outliers that lost less than this share of their point's time are harmless
# The share of repeats that may be outliers on an idle system; it was 0 to 1.4 % in those sweeps. If
# they are independent, two repeats of a prompt are both outliers in 4 of 10,000 prompts.
_SELDOM = 0.02
# There are too many outliers if an idle system would have that many with a probability below this.
_CHANCE = 0.001


@dataclass(frozen=True, slots=True)
class Outlier:
    """A repeat that took far longer than the fastest one of its prompt.

    lost: the seconds that the disturbance cost the whole batch.
    """

    lost: float
    key: Key
    sample: Sample


@dataclass(frozen=True, slots=True)
class Outliers:
    """The outliers among the repeats of several points.

    repeats: the number of repeats of all prompts.
    disturbances: the number of outliers divided by the batch size, because a disturbance slows all
    prompts of a batch.
    chances: the number of repeats divided by the batch size, which is the number of times that a
    disturbance could have occurred.
    seconds: the total time of each point's repeats.
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
        """True if an outlier lost more than `_SLICE` seconds, and more than the share `_WEIGHT` of
        its point's time. Such a long disturbance may also have slowed neighbouring repeats, by too
        little to be noticed."""
        return any(one.lost > max(_SLICE, _WEIGHT * self.seconds[one.key]) for one in self.found)

    @property
    def are_many(self) -> bool:
        """True if there are more outliers than on an idle system. In that case all repeats of some
        prompt may have been disturbed, which would not be noticed.

        This uses the Chernoff-Hoeffding bound on the tail of a binomial distribution. If each of n
        repeats is an outlier with probability p, then the probability that a share of s or more are
        outliers is at most exp(-n KL(s, p)).
        """
        share, rate = self.disturbances / max(self.chances, 1e-9), _SELDOM
        if share <= rate:
            return False
        divergence = share * math.log(share / rate)
        if share < 1.0:
            divergence += (1 - share) * math.log((1 - share) / (1 - rate))
        return self.chances * divergence > -math.log(_CHANCE)
