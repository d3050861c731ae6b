"""Expected acceptance along a text that is already written; `experiment.predict` uses it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected acceptance of proposals at each of the N output tokens of a text.

    A draft model has `accept` and `overlap`. accept: N chances that the token was accepted if its
    position had a proposal: min(1, q(x) / p(x)); 0 past the draft's context. overlap: N sums of
    min(p, q) over the vocabulary, the acceptance rate before the token is known. Lookups have
    `chains`: at each token, the number of proposals of a round beginning there, and the number
    accepted. Heads, whose proposals depend on those before them, have `ahead`: at each token, the
    chances of the proposals of a round beginning there; and the `overlap` of the first of them.
    Given rates have `draws` and `rates`: N uniform numbers, and the chance of acceptance at each
    place of a draft; a token is accepted if its number is below the rate of its place. only_k: the
    proposal length that all this is of, where other lengths have other proposals.
    """

    accept: tuple[float, ...] | None = None
    overlap: tuple[float, ...] | None = None
    chains: tuple[tuple[int, int], ...] | None = None
    ahead: tuple[tuple[float, ...], ...] | None = None
    draws: tuple[float, ...] | None = None
    rates: tuple[float, ...] | None = None
    only_k: int | None = None
