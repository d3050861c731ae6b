"""The interface between a round and an acceptance rule. Also samples the token of a round without
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
    """Raised if acceptance cannot be predicted from the probabilities of single tokens."""


class AcceptanceRule(Protocol):
    """A rule that accepts or rejects proposals.

    is_lossless: whether the output follows the target's distribution. looks_ahead: whether a
    decision depends on proposals past the last accepted one; each round then gets its own noise.
    draws_when_greedy: whether the rule reads noise even in greedy decoding. judges_jointly: whether
    a proposal's acceptance depends on more than its own probabilities, and so cannot be forecast
    from them. remark: a note that is shown beside a lossy rule's results.
    """

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
        """Decide a round with K >= 1. Only rank 0 calls this. It must use tensor operations only.

        noise: None if decoding is greedy, unless `draws_when_greedy`.
        """
        ...

    def forecast(
        self, index: int, start: int, count: int, k: int, params: SamplingParams
    ) -> Forecast | None:
        """Return the expected acceptance over `count` output tokens after a prompt of `start`
        tokens, if it depends only on this rule. Return None if it follows from the proposer's
        forecast. Raises `NoForecast` if it can be predicted from neither."""
        if self.judges_jointly and not params.is_greedy:
            raise NoForecast
        return None


@dataclass(frozen=True, slots=True)
class Rule:
    """The functions of a rule. make: makes the rule from a recipe. for_k: adapts the recipe's
    speculation section to a different largest k, for rules whose options only apply to one k;
    raises `UsageError` if that is impossible."""

    make: Callable[[SpeculationSection], AcceptanceRule]
    for_k: Callable[[SpeculationSection, int], SpeculationSection] = lambda own, _: own


class LosslessRule(AcceptanceRule):
    """A lossless rule, given by its `test`, such as `ops.reject_logits`, which compares the
    target's and the draft's distributions. Greedy decoding needs only the target's choices."""

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
    """Decide a round without proposals: sample one token from the target's distribution."""
    sample = None if noise is None else noise.sample[:, 0]
    tokens = draw(target.logits[:, 0], None, params, sample)
    return Verdict(tokens[:, None], tokens.clamp(max=0))
