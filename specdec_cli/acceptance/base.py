"""The interface that acceptance rules implement. `draw_next` handles rounds without proposals,
which need no rule."""

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

    is_lossless: whether the output follows the target's distribution.
    looks_ahead: whether a decision depends on proposals or random numbers past the last accepted
        token. The next round decides those positions again, so it must draw new random numbers for
        them.
    draws_when_greedy: whether the rule uses random numbers even in greedy decoding.
    judges_jointly: whether a proposal's acceptance depends on more than the probabilities of that
        token alone. Acceptance then cannot be forecast from these probabilities.
    keeps_greedy: whether greedy decoding writes the target's own text, although the rule is lossy.
    remark: a note to show beside the results of a lossy rule; None for no note.
    """

    is_lossless: bool = False
    looks_ahead: bool = False
    draws_when_greedy: bool = False
    judges_jointly: bool = False
    keeps_greedy: bool = False
    remark: str | None = None

    def decide(
        self,
        candidates: Candidates,
        target: TargetOutput,
        params: SamplingParams,
        noise: Noise | None,
    ) -> Verdict:
        """Decide which proposals a round accepts, and choose the token after them. Called only on
        rank 0, and only if K >= 1.

        The round may be captured as a CUDA graph, so this must use tensor operations only.

        noise: the round's random numbers. None in greedy decoding, unless the rule has
        `draws_when_greedy`.
        """
        ...

    def check(self) -> None:
        """Raise `UsageError` if decisions since the last call were invalid. Runs on the host, after
        each run; only a plugin's rule has anything to check."""
        return

    def forecast(
        self, index: int, start: int, count: int, k: int, params: SamplingParams
    ) -> Forecast | None:
        """Predict which proposals would be accepted at each of `count` output tokens, for a rule
        whose decisions do not depend on the draft. Returns None if they do; the proposer then makes
        the forecast. Raises `NoForecast` if no forecast is possible.

        index: the prompt's index, which selects its random numbers.
        start: the number of prompt tokens.
        k: the maximum number of proposals per round.
        """
        if self.judges_jointly and not params.is_greedy:
            raise NoForecast
        return None


@dataclass(frozen=True, slots=True)
class Rule:
    """The entry point of a rule's module. Its functions take a recipe's speculation section.

    make: makes the rule from the section.
    for_k: adapts the section to a different largest k. A rule needs this if its options are valid
        for one k only; the default returns the section unchanged. Raises `UsageError` if the
        options cannot be adapted.
    """

    make: Callable[[SpeculationSection], AcceptanceRule]
    for_k: Callable[[SpeculationSection, int], SpeculationSection] = lambda own, _: own


class LosslessRule(AcceptanceRule):
    """A base class for lossless rules. A subclass sets `test`, a function that verifies proposals
    by comparing the target's and the draft's distributions, such as `ops.reject_logits`. In greedy
    decoding `test` is not called: a proposal is accepted if it is the target's most likely
    token."""

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
