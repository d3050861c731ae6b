"""Modified rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318)."""

from specdec_kernels import ops

from specdec_cli.acceptance.base import AcceptanceRule, compare_with_draft
from specdec_cli.core.candidates import Candidates, Noise, TargetOutput, Verdict
from specdec_cli.core.types import SamplingParams


class Rejection(AcceptanceRule):
    """Accept d_i iff u_i * q(d_i) < p(d_i); at the first rejection draw from norm(max(p - q, 0)).

    If every proposal is accepted, draw from the target's next distribution. Greedy decoding is the
    one-hot case, which needs only the target's choices.
    """

    is_lossless = True

    def decide(
        self,
        candidates: Candidates,
        target: TargetOutput,
        params: SamplingParams,
        noise: Noise | None,
    ) -> Verdict:
        return compare_with_draft(ops.reject_logits, candidates, target, params, noise)
