"""Predicts the speed-up at one proposal length from texts that were decoded at another.

Replaying the texts gives the number of rounds. The time curve (`sweep.time_curve`) gives the cost
of a round at each k.

Replay is valid if decoding is lossless, because the text then follows the target's distribution at
any k. Let p and q be the distributions of target and draft at a position where the text has token x
and a token was proposed. Then x was an accepted proposal with probability min(1, q(x) / p(x)),
independently of where rounds began. This is the probability that x is proposed and accepted,
min(p(x), q(x)), divided by the probability that x is generated, p(x). So one text with these
probabilities gives the expected rounds for every k. In greedy decoding the probabilities are 0 or
1, and the replay gives exactly the rounds of a run.
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
        """Return the acceptance probability of each proposal of a round that begins at token
        `start`.

        Probabilities past the end of the text are unknown. They are given as 0, which has no
        effect, because the round ends with the text.
        """
        asked = max(0, min(k, self.limit - start - 1, self.draft_limit - start))
        known: tuple[float, ...] | None = None
        if self.accept is not None:
            known = self.accept[start : start + asked]
        elif self.ahead is not None:
            known = self.ahead[start][:asked]
        if known is not None:
            # If `known` reaches the end of the text, pad it with zeros. If it is short for another
            # reason, the round proposed fewer than `asked` tokens, and nothing is padded.
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


class ReplayText(Text):
    """A line of replay.jsonl: the text generated for a prompt with this draft at the largest k."""

    draft: Name | None
    index: Count

    def as_dict(self) -> dict[str, Any]:
        first = ("draft", "index", "limit", "draft_limit")
        return {name: getattr(self, name) for name in first} | super().as_dict()


@dataclass(slots=True)
class ExpectedRounds:
    """Counts of rounds and proposals for decoding some texts with proposal length `k`. If
    acceptance is random, these are expected values.

    drafts: rounds with proposals.
    plain: rounds without proposals.
    draft_tokens: proposed tokens.
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
    """Compute the expected rounds for decoding `texts` with proposal length `k`, counted as in
    `engine.loop`."""
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
    """Replace the replayed acceptances of a greedy text with those of its recorded rounds. Return
    the text and the number of acceptances that changed.

    These may differ in half precision. The replay computes the logits of a whole text in one
    pass, so its rounding errors differ from those of the run, and either token of a near-tie may
    win.

    rounds: the numbers of proposed and accepted tokens of each round in order, without rounds that
    proposed nothing.
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
    """Return the mean number of tokens that a round writes if each proposal is accepted with
    probability alpha: (1 - alpha^(k+1)) / (1 - alpha).

    Leviathan et al., arXiv:2211.17192, equation 1.
    """
    return sum(alpha**i for i in range(k + 1))


@dataclass(frozen=True, slots=True)
class Forecasts:
    """The data for predictions with one draft at one batch size.

    texts: the outputs at the largest k, by prompt.
    parts: how many seconds a round takes per sequence, by k and by part of the time curve. The
    curve is measured in several parts, which are spread over the sweep and numbered from 0.
    is_exact: whether replaying `texts` gives exactly the rounds of every k.
    """

    largest_k: int
    texts: Mapping[int, Text]
    parts: Mapping[int, Mapping[int, float]]
    is_exact: bool
    _known: dict[tuple[int, int], ExpectedRounds] = field(default_factory=dict, init=False)

    def rounds(self, index: int, k: int) -> ExpectedRounds:
        """Return the expected rounds of one prompt at proposal length `k`."""
        if (index, k) not in self._known:
            self._known[index, k] = expected_rounds([self.texts[index]], k)
        return self._known[index, k]

    def all_rounds(self, k: int) -> ExpectedRounds:
        """Return the expected rounds of all prompts at proposal length `k`."""
        return sum((self.rounds(index, k) for index in sorted(self.texts)), ExpectedRounds(k))

    def gain(self, k: int, prompts: Iterable[int], parts: Iterable[int]) -> Product | None:
        """Predict the speed-up at `k` over the given prompts, with costs from the given parts of
        the time curve. Return None if there are no prompts or no parts."""
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
        """Compute the acceptance at which `k` is as fast as plain decoding, from the costs in the
        time curve. Return None if k is 0, or if there are no costs or no texts."""
        parts = sorted(self.timed(0, k))
        if k == 0 or not parts or not self.texts:
            return None
        costs = np.asarray([[self.parts[k][part], self.parts[0][part]] for part in parts])
        return break_even(MidRatio(costs, (1, -1)), self.all_rounds(k), seed)

    def other_k(self, k: int) -> int | None:
        """Return the only proposal length for which the texts' acceptance probabilities hold, if it
        is not `k`. Return None if they hold at `k`, as they always do at k = 0."""
        only = {text.only_k for text in self.texts.values() if text.only_k is not None}
        return next((one for one in only if k not in (0, one)), None)

    def timed(self, *ks: int) -> set[int]:
        """Return the indices of the parts of the time curve that were measured at all of `ks`."""
        return set.intersection(*(set(self.parts.get(k, ())) for k in ks))


def prediction_of(
    point: Point,
    forecasts: Forecasts,
    alpha: float,
    samples: Samples,
    baseline: Samples,
    seed: int,
) -> Prediction | None:
    """Predict a point's speed-up and mean acceptance length, and their errors if the point was
    measured. Return None if there are no texts to replay.

    alpha: the acceptance rate for the geometric model (`iid_length`).
    samples, baseline: the samples of the point and of k = 0, without those that ended in an error.
    """
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
    """Compute the acceptance rate of the proposals whose predecessors in the round were all
    accepted, over all positions."""
    chosen = list(samples)
    accepted = sum(sum(s.accepted_per_round) for s in chosen)
    rejected = sum(
        a < p
        for s in chosen
        for p, a in zip(_judged_per_round(s), s.accepted_per_round, strict=True)
    )
    return accepted / max(1, accepted + rejected)


def _judged_per_round(sample: Sample) -> list[int]:
    """Return for each round the number of proposals that the target accepted or could have
    rejected.

    All proposals count, with one exception. If an accepted end-of-text token or stop string ends
    the text in the last round, the proposals after it do not count.
    """
    proposed, accepted = sample.proposed_per_round, sample.accepted_per_round
    # All rounds add one of the target's own tokens, except a last round that ends the text early.
    whole = sum(accepted) + len(accepted) + sample.rounds_without_proposal
    if sample.finish_reason in ("eos", "stop") and len(sample.token_ids) < whole:
        return [*proposed[:-1], *accepted[-1:]]
    return list(proposed)


_STEPS = 50  # steps of a bisection


def break_even(cost: SumRatio | MidRatio, rounds: ExpectedRounds, seed: int) -> BreakEven:
    """Compute the acceptance at which a point is as fast as plain decoding.

    cost: how long a round takes per sequence, relative to a round at k = 0.
    """
    is_predicted = isinstance(cost, MidRatio)
    ends = cost.interval() if isinstance(cost, MidRatio) else interval_of(cost, seed)
    needed, share = cost.value, rounds.drafts / rounds.total if rounds.total else 0.0
    # Rounds without proposals write one token each. The others must raise the mean to `needed`.
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
    """Find the acceptance probability at which `iid_length` is `length`. Return None if even a
    probability of 1 is not enough."""
    if length > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if iid_length(middle, k) < length else (low, middle)
    return low if length > 1.0 else 0.0
