"""Predicts points: replayed texts give the rounds, and the time curve gives their costs.

Rounds of other proposal lengths are predicted on texts that already exist, from the records of each
prompt. This is valid if decoding is lossless: for any k the text follows the target's distribution.
Given the text, a token x at a proposed position was an accepted proposal with probability min(1,
q(x) / p(x)), independently of where rounds began. (Proposal d ~ q is accepted as x with probability
min(p(x), q(x)), and x is generated with probability p(x).) So one text with these probabilities
gives the expected rounds for every k. In greedy decoding the probabilities are 0 or 1, and the
replay gives exactly the rounds of a run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec_cli.core.figures import Count, Name, Whole
from specdec_cli.core.forecast import Forecast
from specdec_cli.experiment.folders.records import BreakEven, Point, Prediction, Sample, given
from specdec_cli.experiment.folders.samples import Samples
from specdec_cli.experiment.statistics.factors import MidRatio, Product, interval_of, midmean
from specdec_cli.experiment.statistics.stats import SumRatio, speedup


class Text(Forecast):
    """One prompt's output, and the acceptance probabilities of proposals for it.

    limit: the prompt's maximum number of output tokens. draft_limit: the number of output tokens
    that fit into the draft's context.
    """

    limit: Count
    draft_limit: Whole  # below 0 if the prompt is longer than the draft's context

    @property
    def length(self) -> int:
        return len(self.accept or self.chains or self.ahead or self.draws or ())

    def round_at(self, start: int, k: int) -> Sequence[float]:
        """The acceptance probabilities of the proposals of a round that begins at token `start`.

        Probabilities past the end of the text are unknown and do not matter. They are given as 0.
        """
        asked = max(0, min(k, self.limit - start - 1, self.draft_limit - start))
        if self.accept is not None or self.ahead is not None:
            known = self._known(start, asked)
            # A round may propose fewer tokens than `k`. Probabilities past the text's end are
            # unknown.
            is_cut = start + len(known) >= self.length
            return known + (0.0,) * (asked - len(known) if is_cut else 0)
        if self.draws is not None:
            known = tuple(
                float(draw < rate)
                for draw, rate in zip(
                    self.draws[start : start + asked], (self.rates or ())[:asked], strict=False
                )
            )
            return known + (0.0,) * (asked - len(known))
        assert self.chains is not None
        found, stand = self.chains[start]
        found = min(found, asked)
        return (1.0,) * min(stand, found) + (0.0,) * (found - min(stand, found))

    def _known(self, start: int, asked: int) -> tuple[float, ...]:
        """The acceptance probabilities of at most `asked` proposals of a round that begins at token
        `start`."""
        if self.accept is not None:
            return self.accept[start : start + asked]
        assert self.ahead is not None
        return self.ahead[start][:asked]


class ReplayText(Text):
    """A line of replay.jsonl: the text of a prompt with a draft at the largest k."""

    draft: Name | None
    index: Count

    def as_dict(self) -> dict[str, Any]:
        first = ("draft", "index", "limit", "draft_limit")
        return {name: getattr(self, name) for name in first} | super().as_dict()


@dataclass(slots=True)
class ExpectedRounds:
    """Counts of rounds over some texts, or their expected values. They are whole numbers if
    acceptance is certain.

    drafts: rounds with proposals. plain: rounds without proposals. draft_tokens: proposed tokens.
    accepted: accepted proposals.
    """

    k: int
    drafts: float = 0.0
    plain: float = 0.0
    draft_tokens: float = 0.0
    accepted: float = 0.0

    def __add__(self, other: "ExpectedRounds") -> "ExpectedRounds":
        counts = ("drafts", "plain", "draft_tokens", "accepted")
        return ExpectedRounds(self.k, *(getattr(self, n) + getattr(other, n) for n in counts))

    @property
    def total(self) -> float:
        return self.drafts + self.plain

    @property
    def mean_acceptance_length(self) -> float:
        return 1.0 + (self.accepted / self.drafts if self.drafts else 0.0)


def expected_rounds(texts: Iterable[Text], k: int) -> ExpectedRounds:
    """The expected rounds of proposal length `k` over `texts`, counted as in `engine.loop`."""
    found = ExpectedRounds(k)
    for text in texts:
        begins = [0.0] * (text.length + 1)  # chance that a round starts at each token
        begins[0] = 1.0
        for start in range(text.length):
            chance = begins[start]
            if chance == 0.0:
                continue
            chain = text.round_at(start, k)
            if chain:
                found.drafts += chance
                found.draft_tokens += chance * len(chain)
            else:
                found.plain += chance
            for place, accepted in enumerate(chain):
                if start + place >= text.length:  # the text ended in an accepted proposal
                    chance = 0.0
                    break
                begins[min(start + place + 1, text.length)] += chance * (1.0 - accepted)
                chance *= accepted
                found.accepted += chance
                if chance == 0.0:
                    break
            if chance:
                begins[min(start + len(chain) + 1, text.length)] += chance
    return found


def with_recorded(text: Text, rounds: Iterable[tuple[int, int]]) -> tuple[Text, int]:
    """Correct a greedy run's text by its recorded rounds, and count the corrections.

    rounds: the numbers of proposed and accepted tokens of each round in order, without rounds that
    proposed nothing. A pass over a whole text rounds differently from passes over single tokens, so
    near-ties may flip in half precision.
    """
    accept, ahead = list(text.accept or ()), [list(row) for row in text.ahead or ()]
    start = news = 0
    for proposed, accepted in rounds:
        known, begin = (accept, start) if text.ahead is None else (ahead[start], 0)
        for place in range(min(proposed, accepted + 1)):
            if begin + place < len(known):
                shown = float(place < accepted)
                news += known[begin + place] != shown
                known[begin + place] = shown
        start += accepted + 1
    if text.ahead is None:
        return text.model_copy(update={"accept": tuple(accept)}), news
    return text.model_copy(update={"ahead": tuple(map(tuple, ahead))}), news


def iid_length(alpha: float, k: int) -> float:
    """The mean number of tokens of a round if each proposal is accepted with chance `alpha`: (1 -
    a^(k+1)) / (1 - a).

    Leviathan et al., 2211.17192, equation 1.
    """
    return sum(alpha**i for i in range(k + 1))


@dataclass(frozen=True, slots=True)
class Forecasts:
    """The data for predictions with one draft and batch size.

    texts: the outputs of the run at the largest k, by prompt. parts: for each k and part of the
    time curve, the seconds of engine time per round of one sequence. is_exact: whether replaying
    `texts` gives exactly the rounds of every k.
    """

    largest_k: int
    texts: Mapping[int, Text]
    parts: Mapping[int, Mapping[int, float]]
    is_exact: bool
    _known: dict[tuple[int, int], ExpectedRounds] = field(default_factory=dict, init=False)

    def rounds(self, index: int, k: int) -> ExpectedRounds:
        """The expected rounds of one prompt at proposal length `k`."""
        if (index, k) not in self._known:
            self._known[index, k] = expected_rounds([self.texts[index]], k)
        return self._known[index, k]

    def all_rounds(self, k: int) -> ExpectedRounds:
        """The expected rounds of all prompts at proposal length `k`."""
        return sum((self.rounds(index, k) for index in sorted(self.texts)), ExpectedRounds(k))

    def gain(self, k: int, prompts: Iterable[int], parts: Iterable[int]) -> Product | None:
        """The predicted speed-up at `k` over some prompts and parts; None if either is empty."""
        chosen, timed = sorted(prompts), sorted(parts)
        plain = [self.rounds(i, 0).total for i in chosen]
        rounds = [self.rounds(i, k).total for i in chosen]
        if not timed or not sum(rounds):
            return None
        costs = [[self.parts[0][part], self.parts[k][part]] for part in timed]
        return Product(
            SumRatio(np.stack((np.asarray(plain), np.asarray(rounds)), axis=1), (1, -1)),
            MidRatio(np.asarray(costs), (1, -1)),
        )

    def break_even(self, k: int, seed: int) -> BreakEven | None:
        """The break-even at `k`, from the costs in the time curve; None without costs."""
        parts = sorted(self.timed(0, k))
        if k == 0 or not parts or not self.texts:
            return None
        costs = np.asarray([[self.parts[k][part], self.parts[0][part]] for part in parts])
        return break_even(MidRatio(costs, (1, -1)), self.all_rounds(k), seed)

    def other_k(self, k: int) -> int | None:
        """The k whose proposals are used in place of those at `k`; None if proposals do not depend
        on k."""
        only = {text.only_k for text in self.texts.values() if text.only_k is not None}
        return next((one for one in only if k not in (0, one)), None)

    def timed(self, *ks: int) -> set[int]:
        """The parts of the time curve that were measured at all of `ks`."""
        return set.intersection(*(set(self.parts.get(k, ())) for k in ks))


def prediction_of(
    point: Point,
    forecasts: Forecasts,
    alpha: float,
    samples: Samples,
    baseline: Samples,
    seed: int,
) -> Prediction | None:
    """Predict mean length and speed-up, with their errors if the point was measured. samples,
    baseline: the samples of the point and of k = 0, without samples that ended in an error."""
    if not forecasts.texts:
        return None
    k, parts = point.k, forecasts.timed(0, point.k)
    gain = forecasts.gain(k, forecasts.texts, parts)
    predicted = None
    if gain is not None:
        costs = [midmean([forecasts.parts[one][part] for part in sorted(parts)]) for one in (0, k)]
        total, plain = (forecasts.all_rounds(one).total for one in (k, 0))
        predicted = plain * costs[0] / (total * costs[1])
    common = forecasts.texts.keys() & samples.keys() & baseline.keys()
    error = None
    if common and (paired := forecasts.gain(k, common, parts)) is not None:
        found = speedup({i: samples[i] for i in common}, baseline)
        assert found is not None
        error = Product(paired.prompts.over(found), paired.parts).interval(seed)
    faster = point.speedup
    length, iid = forecasts.all_rounds(k).mean_acceptance_length, iid_length(alpha, k)
    true_length = point.metrics.mean_acceptance_length if point.metrics else None
    overlaps = [o for text in forecasts.texts.values() for o in text.overlap or ()]
    return Prediction(
        method="replay",
        is_exact=forecasts.is_exact and forecasts.other_k(k) is None,
        speedup=predicted,
        speedup_error=predicted / faster - 1 if predicted and faster else None,
        mean_acceptance_length=length,
        mean_acceptance_length_error=length / true_length - 1 if true_length else None,
        iid_alpha=alpha,
        iid_mean_acceptance_length=iid,
        iid_error=iid / true_length - 1 if true_length else None,
        analytic_alpha=sum(overlaps) / len(overlaps) if overlaps else None,
        **given(
            speedup_ci=gain.interval(seed) if gain is not None else None,
            speedup_error_ci=[end - 1 for end in error] if error else None,
            drafts_of_k=forecasts.other_k(k),
        ),
    )


def iid_alpha(samples: Iterable[Sample]) -> float:
    """The acceptance rate over all positions, among proposals whose predecessors were accepted."""
    chosen = list(samples)
    accepted = sum(sum(s.accepted_per_round) for s in chosen)
    rejected = sum(
        a < p
        for s in chosen
        for p, a in zip(_judged_per_round(s), s.accepted_per_round, strict=True)
    )
    return accepted / max(1, accepted + rejected)


def _judged_per_round(sample: Sample) -> list[int]:
    """The number of proposals in each round that were accepted or could have been rejected.

    That is every proposal, except those after the end of the text, if accepted proposals in the
    last round end it by an end-of-text token or a stop string.
    """
    proposed, accepted = sample.proposed_per_round, sample.accepted_per_round
    # Every other round adds one of the target's own tokens, whether or not it rejects a proposal.
    whole = sum(accepted) + len(accepted) + sample.rounds_without_proposal
    if sample.finish_reason in ("eos", "stop") and len(sample.token_ids) < whole:
        return [*proposed[:-1], *accepted[-1:]]
    return list(proposed)


_STEPS = 50  # steps of a bisection


def break_even(cost: SumRatio | MidRatio, rounds: ExpectedRounds, seed: int) -> BreakEven:
    """Compute the break-even of a point. cost: the seconds of a sequence's round, divided by those
    of a round at k = 0."""
    is_predicted = isinstance(cost, MidRatio)
    ends = cost.interval() if isinstance(cost, MidRatio) else interval_of(cost, seed)
    needed, share = cost.value, rounds.drafts / rounds.total if rounds.total else 0.0
    # Rounds without proposals write one token each; so the other rounds must write more.
    length = 1 + (needed - 1) / share if share else float("inf")
    asked = rounds.draft_tokens
    rate = max(0.0, length - 1) * rounds.drafts / asked if asked else float("inf")
    return BreakEven(
        tokens_per_round=needed,
        tokens_per_round_ci=ends,
        draft_acceptance_rate=rate if rate <= 1.0 else None,
        alpha=chance_for(length, rounds.k),
        is_predicted=is_predicted,
    )


def chance_for(length: float, k: int) -> float | None:
    """Find the chance of acceptance at which `iid_length` is `length`; None if even a chance of 1
    is not enough."""
    if length > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if iid_length(middle, k) < length else (low, middle)
    return low if length > 1.0 else 0.0
