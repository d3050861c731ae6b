"""What a round needs of an acceptance rule, and how every rule draws without proposals."""

from typing import Protocol

from specdec_cli.core.candidates import Candidates, Noise, TargetOutput, Verdict
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.sampling import draw, softmax_stats
from specdec_cli.core.types import SamplingParams


class AcceptanceRule(Protocol):
    """is_lossless: whether the output follows the target's distribution. looks_ahead: whether a
    decision rests on proposals behind the last one accepted; the next round's noise is then
    another. draws_when_greedy: whether it reads noise even where decoding is greedy. remark: what
    a reader of any number has to know of a rule that is not lossless.
    """

    @property
    def is_lossless(self) -> bool: ...
    @property
    def looks_ahead(self) -> bool: ...
    @property
    def draws_when_greedy(self) -> bool: ...
    @property
    def remark(self) -> str | None: ...

    def decide(
        self,
        candidates: Candidates,
        target: TargetOutput,
        params: SamplingParams,
        noise: Noise | None,
    ) -> Verdict:
        """Decide a round of K >= 1 proposals a sequence, on rank 0, with tensor operations alone.

        noise: None where nothing reads it.
        """
        ...

    def forecast(
        self, index: int, start: int, count: int, k: int, params: SamplingParams
    ) -> Forecast | None:
        """The fate of proposals for `count` output tokens where this rule alone decides it.

        index: of the prompt, of `start` tokens. None where the proposer's own forecast holds.
        Raises `NoForecast` where there is none.
        """
        ...


class NoForecast(Exception):
    """A rule's acceptance cannot be told from the chances of single tokens."""


def draw_next(target: TargetOutput, params: SamplingParams, noise: Noise | None) -> Verdict:
    """The decision of a round without proposals: one token from the target's distribution."""
    logits = target.logits[:, 0]
    stats = None if params.is_greedy else softmax_stats(logits, params)
    tokens = draw(logits, stats, params, None if noise is None else noise.sample[:, 0])
    return Verdict(tokens[:, None], tokens.clamp(max=0))
