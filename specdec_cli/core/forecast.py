"""How proposals for a text that is already written would fare; `experiment.predict` concludes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forecast:
    """The fate of proposals for each output token of a text, of N.

    accept: N chances that the token is accepted where it is proposed, min(1, q(x) / p(x)); 0 past
    the draft's context. overlap: N sums of min(p, q) over the vocabulary, the acceptance rate
    before it was known which token would be written. chains: for proposals that are looked up, in
    place of both, the number of tokens that a round beginning there proposes, and the number that
    stand. draws, rates: for acceptance at given rates, in place of all these, N uniform numbers and
    the chance of acceptance at each place of a draft: a token stands where its number is below the
    rate of its place.
    """

    accept: tuple[float, ...] | None = None
    overlap: tuple[float, ...] | None = None
    chains: tuple[tuple[int, int], ...] | None = None
    draws: tuple[float, ...] | None = None
    rates: tuple[float, ...] | None = None
