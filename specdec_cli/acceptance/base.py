"""The interface between a round and an acceptance rule, and the draw for rounds without
proposals."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from specdec_kernels import ops
from torch import Tensor

from specdec_cli.core.candidates import Candidates, Noise, TargetOutput, Verdict
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.sampling import draw, greedy_pick, softmax_stats
from specdec_cli.core.types import SamplingParams
from specdec_cli.recipe import SpeculationSection


class NoForecast(Exception):
    """The rule's acceptance cannot be predicted from the probabilities of single tokens."""


class AcceptanceRule(Protocol):
    """A rule that accepts or rejects proposals, with defaults. is_lossless: whether the output
    follows the target's distribution. looks_ahead: whether a decision depends on proposals past the
    last accepted one; noise is then keyed by round too. draws_when_greedy: whether the rule reads
    noise even in greedy decoding. judges_jointly: whether the probabilities of single tokens do not
    predict its acceptance. remark: a note shown beside a lossy rule's results."""

    is_lossless: bool = False
    looks_ahead: bool = False
    draws_when_greedy: bool = False
    judges_jointly: bool = False
    remark: str | None = None

    def decide(
        self,
        candidates: Candidates,
        target: TargetOutput,
        params: SamplingParams,
        noise: Noise | None,
    ) -> Verdict:
        """Decide a round of K >= 1 proposals a sequence, on rank 0, with tensor operations only.

        noise: None if decoding is greedy, unless `draws_when_greedy`.
        """
        ...

    def forecast(
        self, index: int, start: int, count: int, k: int, params: SamplingParams
    ) -> Forecast | None:
        """Expected acceptance over `count` output tokens after a prompt of `start`, if this rule
        alone determines it; None if the proposer's forecast applies. Raises `NoForecast` if neither
        predicts it."""
        if self.judges_jointly and not params.is_greedy:
            raise NoForecast
        return None


@dataclass(frozen=True, slots=True)
class Rule:
    """The code of a rule. make: makes the rule from a recipe. for_k: adapts the recipe's
    speculation to a different largest k, for rules whose keys apply to one k; raises `UsageError`
    if it cannot."""

    make: Callable[[SpeculationSection], AcceptanceRule]
    for_k: Callable[[SpeculationSection, int], SpeculationSection] = lambda own, _: own


class LosslessRule(AcceptanceRule):
    """A `test` of the target's distribution against the draft's, such as `ops.reject_logits`.
    Greedy decoding is the one-hot case, which needs only the target's choices."""

    is_lossless = True
    test: Callable[[ops.Verification], tuple[Tensor, Tensor]]

    def decide(
        self,
        candidates: Candidates,
        target: TargetOutput,
        params: SamplingParams,
        noise: Noise | None,
    ) -> Verdict:
        c = candidates
        if params.is_greedy:
            return Verdict(*ops.accept(c.token_ids, greedy_pick(target.logits), c.lens))
        assert noise is not None
        q = None if c.q is None else c.q.logits
        q_rows = None if c.q is None else c.q.stats
        p_rows = softmax_stats(target.logits.flatten(0, 1), params)
        where = c.token_ids, c.lens, q, q_rows, target.logits, p_rows
        decided = self.test(ops.Verification(*where, *params.filters, noise.accept, noise.sample))
        return Verdict(*decided)


def draw_next(target: TargetOutput, params: SamplingParams, noise: Noise | None) -> Verdict:
    """The decision of a round without proposals: one token from the target's distribution."""
    sample = None if noise is None else noise.sample[:, 0]
    tokens = draw(target.logits[:, 0], None, params, sample)
    return Verdict(tokens[:, None], tokens.clamp(max=0))
