"""Modified rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318)."""

from specdec_kernels import ops

from specdec_cli.acceptance.base import Rule
from specdec_cli.core.candidates import Candidates, Noise, TargetOutput, Verdict
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.sampling import greedy_pick, softmax_stats
from specdec_cli.core.types import SamplingParams


class Rejection:
    """Accept d_i iff u_i * q(d_i) < p(d_i); at the first rejection draw from norm(max(p - q, 0)).

    If every proposal is accepted, draw from the target's next distribution. Greedy decoding is the
    one-hot case, which needs only the target's choices.
    """

    is_lossless = True
    looks_ahead = False
    draws_when_greedy = False
    remark = None

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
        decided = ops.reject_logits(
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
        return None


RULE = Rule(lambda _: Rejection())
