"""Block verification (Sun et al., arXiv 2403.10444): proposals are judged jointly.

The rule is lossless like rejection sampling, and in expectation accepts as many proposals or more.
"""

from specdec_kernels import ops

from specdec_cli.acceptance.base import NoForecast, Rule
from specdec_cli.core.candidates import Candidates, Noise, TargetOutput, Verdict
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.sampling import greedy_pick, softmax_stats
from specdec_cli.core.types import SamplingParams


class Block:
    """Accept the longest prefix of the proposals that passes a test of its joint probability.

    A longer prefix may pass even if a shorter one does not, so a decision depends on proposals past
    the last accepted one. In greedy decoding the rule equals rejection sampling.
    """

    is_lossless = True
    looks_ahead = True
    draws_when_greedy = False
    remark: str | None = None

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
        decided = ops.block_verify_logits(
            c.token_ids,
            c.lens,
            c.q.logits if c.q is not None else None,
            c.q.stats if c.q is not None else None,
            target.logits,
            softmax_stats(target.logits.flatten(0, 1), params),
            *params.filters,
            noise.accept,
            noise.sample,
        )
        return Verdict(*decided)

    def forecast(
        self, index: int, start: int, count: int, k: int, params: SamplingParams
    ) -> Forecast | None:
        """None in greedy decoding; otherwise chances of single tokens do not predict this rule."""
        if params.is_greedy:
            return None
        raise NoForecast


RULE = Rule(lambda _: Block())
