"""Prices the acceptance that a sweep measured at the stage times of larger models.

A sweep over a real model gives the tokens that a round of each method writes. Rounds on random
weights of other shapes give the times of stages there. Together they show which method would win
there, if it were accepted as often, and the acceptance at which it breaks even.

stages.json has the times, in milliseconds, of one model and batch size in each entry: scoring by
the number of proposals, linear between them and beyond; and for each method the costs of a round,
once and for each proposal. `reckoned` names methods whose pass was not measured: its time is that
of its bytes at the rate of DFlash's.
"""

import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec_cli.experiment.forecasts import chance_for

STAGES = Path(__file__).with_name("stages.json")
Samples = list[dict[str, Any]]


def samples(path: Path) -> Samples:
    """The samples of a sweep with batch size 1."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    return [sample for sample in found if sample["batch_size"] == 1 and sample["k"] > 0]


def of_arm(found: Samples, arm: str) -> dict[int, Samples]:
    """The samples of one arm by k."""
    own = [sample for sample in found if sample["draft"] == arm]
    return {k: [s for s in own if s["k"] == k] for k in sorted({s["k"] for s in own})}


def rates(found: Samples, k: int) -> list[float]:
    """For each position the share of rounds in which its proposal was accepted.

    A round in which n-grams found nothing accepts none. Other methods propose in every round with
    room for two tokens, so a round without a proposal is the last one of a text. It is left out, as
    are other last rounds, which propose fewer than k. For n-grams it counts, since samples do not
    tell it from a round that found nothing.
    """
    rounds, accepted = 0, [0] * k
    for sample in found:
        pairs = zip(sample["accepted_per_round"], sample["proposed_per_round"], strict=True)
        counts = [stood for stood, proposed in pairs if proposed == k]
        rounds += len(counts)
        if sample["draft"] == "ngram":
            rounds += sample["rounds_without_proposal"]
        for i in range(k):
            accepted[i] += sum(count > i for count in counts)
    return [count / rounds for count in accepted]


@dataclass(frozen=True)
class Stages:
    """An entry of stages.json. methods: the cost of a round once, and of each proposal."""

    model: str
    batch_size: int
    scoring: Mapping[int, float]
    rest: float
    methods: Mapping[str, tuple[float, float]]
    reckoned: tuple[str, ...] = ()

    def round_ms(self, method: str | None, k: int) -> float:
        """The milliseconds of a round; without a method, of plain decoding."""
        counts, times = zip(*sorted(self.scoring.items()), strict=True)
        scoring = np.interp(k, counts, times)
        if k > counts[-1] and len(counts) > 1:
            slope = (times[-1] - times[-2]) / (counts[-1] - counts[-2])
            scoring += (k - counts[-1]) * slope
        once, each = self.methods[method] if method is not None else (0.0, 0.0)
        return float(scoring) + self.rest + once + k * each


def read_stages(path: Path = STAGES) -> list[Stages]:
    found = json.loads(path.read_text())
    return [
        Stages(
            entry["model"],
            entry["batch_size"],
            {int(k): ms for k, ms in entry["scoring"].items()},
            entry["rest"],
            {name: (once, each) for name, (once, each) in entry["methods"].items()},
            tuple(entry.get("reckoned", ())),
        )
        for entry in found
    ]


@dataclass(frozen=True)
class Price:
    """A method at one k. length: tokens a round. ratio: its speed over that of plain decoding.
    needed: tokens a round at which the speeds are equal."""

    k: int
    round_ms: float
    length: float
    ratio: float
    needed: float

    @property
    def chance(self) -> float | None:
        """The chance of each proposal at which the method breaks even, or None."""
        return chance_for(self.needed, self.k)


def best_price(stages: Stages, method: str, lengths: Mapping[int, float]) -> Price:
    """The fastest k of a method. lengths: tokens a round by k."""
    plain = stages.round_ms(None, 0)

    def at(k: int) -> Price:
        took = stages.round_ms(method, k)
        return Price(k, took, lengths[k], lengths[k] * plain / took, took / plain)

    return max(map(at, lengths), key=lambda price: price.ratio)


def lengths_of(found: Samples, arm: str) -> dict[int, float]:
    """Tokens a round of an arm by k."""
    return {k: 1 + sum(rates(some, k)) for k, some in of_arm(found, arm).items()}
