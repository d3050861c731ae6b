"""Predicts the rounds of other proposal lengths over a text that is already written.

Works on the records of each prompt and knows no engine. The argument, for lossless decoding: for
any k, the text follows the target's distribution, and given the text a token x at a position
that was proposed came by acceptance with probability min(1, q(x) / p(x)), independently of how the
rounds fell. (Proposal d ~ q is accepted as x with probability min(p(x), q(x)), and x is written
with probability p(x).) So one text with these probabilities gives the expected rounds for every k.
For greedy decoding they are 0 or 1, and the replay gives exactly the rounds of a run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_cli.core.figures import Count, Name, Whole
from specdec_cli.core.forecast import Forecast


class Text(Forecast):
    """One prompt's output, and the acceptance of proposals for it.

    limit: most output tokens of the prompt. draft_limit: output tokens up to the end of the draft's
    context.
    """

    limit: Count
    draft_limit: Whole  # below 0 if the prompt is longer than the draft's context

    @property
    def length(self) -> int:
        return len(self.accept or self.chains or self.ahead or self.draws or ())

    def round_at(self, start: int, k: int) -> Sequence[float]:
        """Acceptance probabilities of the proposals of a round that begins at token `start`.

        Past the end of the text they are unknown and do not matter: they are 0.
        """
        asked = max(0, min(k, self.limit - start - 1, self.draft_limit - start))
        if self.accept is not None or self.ahead is not None:
            known = self._known(start, asked)
            # A round may propose fewer than were asked for; what lies past the end is not known.
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
        """The chances of at most `asked` proposals of a round that begins at token `start`."""
        if self.accept is not None:
            return self.accept[start : start + asked]
        assert self.ahead is not None
        return self.ahead[start][:asked]


class ReplayText(Text):
    """A line of replay.jsonl: a prompt's text with a draft at the largest k."""

    draft: Name | None
    index: Count

    def as_dict(self) -> dict[str, Any]:
        first = ("draft", "index", "limit", "draft_limit")
        return {name: getattr(self, name) for name in first} | super().as_dict()


@dataclass(slots=True)
class ExpectedRounds:
    """Counts of rounds over some texts, or what is expected of them: whole numbers if acceptance is
    certain.

    drafts: rounds with proposals. plain: rounds without. accepted: accepted proposals.
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
    """Rounds of proposal length `k` over `texts`, as `engine.loop` counts them."""
    found = ExpectedRounds(k)
    for text in texts:
        begins = [0.0] * (text.length + 1)  # chance that a round begins at each token
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
    """The text of a greedy run corrected by its own rounds, and the number of corrections.

    rounds: proposed and accepted tokens of each round from the first on, without rounds that
    proposed nothing. A pass over a whole text has other rounding errors than passes over single
    tokens: in half precision near-ties may flip.
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
    """Tokens a round if each proposal is accepted with chance `alpha`: (1 - a^(k+1)) / (1 - a).

    Leviathan et al., 2211.17192, equation 1.
    """
    return sum(alpha**i for i in range(k + 1))
