"""A prediction of acceptance along a text that is already written. `experiment.forecasts` uses
it."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from specdec_cli.core.figures import Count, Record, impossible

_Numbers = Annotated[tuple[float, ...], Field(strict=False)]  # files hold lists
_Chain = Annotated[tuple[Count, Count], Field(strict=False)]


class Forecast(Record):
    """The expected acceptance of proposals at each of a text's N output tokens, in one of four
    forms.

    A draft model has `accept`: N chances that the token was accepted if proposed, min(1, q(x) /
    p(x)). It also has `overlap`: N sums of min(p, q), the acceptance rate before the token is
    known. Lookups have `chains`: for a round that begins at each token, the number of proposed and
    of accepted tokens. Heads have `ahead`: for a round that begins at each token, the chance that
    each proposal is accepted, given that all earlier ones were. They also have the `overlap` of the
    first proposal. Synthetic acceptance has `draws`: N uniform random numbers, and `rates`: the
    chance of acceptance at each position of a draft. only_k: the only proposal length for which the
    values hold; None if they hold for every length.
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
