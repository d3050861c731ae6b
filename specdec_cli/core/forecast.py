"""Predicted acceptance at each token of a finished output, for any round that could begin there.
`experiment.forecasts` uses it."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from specdec_cli.core.figures import Count, Record, impossible

_Numbers = Annotated[tuple[float, ...], Field(strict=False)]  # JSON has lists, not tuples
_Chain = Annotated[tuple[Count, Count], Field(strict=False)]


class Forecast(Record):
    """The expected acceptance of proposals at each of a text's N output tokens, in one of four
    forms.

    Draft models have `accept` and `overlap`, lookups have `chains`, draft heads have `ahead` and
    `overlap`, and synthetic acceptance has `draws` and `rates`. The other fields are None.

    accept: N probabilities that the token would be accepted if proposed, min(1, q(x) / p(x)).
    overlap: N sums of min(p, q), the acceptance rate before the token is known. For heads, this is
    about the first proposal of a round.
    chains: N pairs, for a round that begins at the token: the numbers of proposed and of accepted
    tokens.
    ahead: N lists, for a round that begins at the token: the probability that each proposal is
    accepted, given that all earlier ones are.
    draws: N uniform random numbers.
    rates: the probability of acceptance at each position of a draft.
    only_k: the only proposal length for which the values hold; None if they hold for every length.
    """

    accept: _Numbers | None = None
    overlap: _Numbers | None = None
    chains: Annotated[tuple[_Chain, ...], Field(strict=False)] | None = None
    ahead: Annotated[tuple[_Numbers, ...], Field(strict=False)] | None = None
    draws: _Numbers | None = None
    rates: _Numbers | None = None
    only_k: Count | None = None

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if [self.accept, self.chains, self.ahead, self.draws].count(None) != 3:
            raise impossible("it needs exactly one of accept, chains, ahead and draws")
        return self
