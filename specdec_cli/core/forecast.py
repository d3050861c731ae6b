"""The expected acceptance of a round that starts at a given token of a finished output.
`experiment.forecasts` predicts the rounds of whole runs from it."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from specdec_cli.core.figures import Count, Record, impossible

_Numbers = Annotated[tuple[float, ...], Field(strict=False)]  # JSON has lists, not tuples
_Chain = Annotated[tuple[Count, Count], Field(strict=False)]


class Forecast(Record):
    """The expected acceptance of proposals at each of a text's N output tokens, in one of four
    forms.

    Draft models have `accept` and `overlap`, lookups have `chains`, draft heads have `ahead` and
    `overlap`, and synthetic acceptance has `draws` and `rates`. The other fields are None. Here p
    is the target's distribution, q is the draft's, and x is the output token.

    accept: N values of min(1, q(x) / p(x)). If a round proposes a token at the position of x, and
    the output token is x, this is the probability that x is the accepted proposal.
    overlap: N sums of min(p, q) over the vocabulary. This is the probability that a proposal at the
    position of x is accepted, over all tokens that the output could have there. For draft heads, it
    holds for the first proposal of a round.
    chains: N pairs, the numbers of proposed and of accepted tokens in a round that begins at the
    token.
    ahead: N lists, one value for each proposal of a round that begins at the token: the probability
    that the proposal is accepted, given that all earlier ones are.
    draws: N uniform random numbers, one per output token.
    rates: the probability of acceptance at each position of a draft.
    only_k: the only proposal length for which the values hold; None if they hold for every length.
    is_rough: True if the proposer also learns from decisions, which a forecast leaves out.
    """

    accept: _Numbers | None = None
    overlap: _Numbers | None = None
    chains: Annotated[tuple[_Chain, ...], Field(strict=False)] | None = None
    ahead: Annotated[tuple[_Numbers, ...], Field(strict=False)] | None = None
    draws: _Numbers | None = None
    rates: _Numbers | None = None
    only_k: Count | None = None
    is_rough: bool | None = None

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if [self.accept, self.chains, self.ahead, self.draws].count(None) != 3:
            raise impossible("it needs exactly one of accept, chains, ahead and draws")
        return self
