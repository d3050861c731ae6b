"""Typical acceptance (Cai et al., "Medusa", arXiv 2401.10774, section 3.3.2): lossy."""

import torch
from specdec_kernels import ops

from specdec_cli.acceptance.base import AcceptanceRule, Rule
from specdec_cli.core.candidates import Candidates, Noise, TargetOutput, Verdict
from specdec_cli.core.sampling import draw, greedy_pick, to_probs
from specdec_cli.core.types import SamplingParams


class Typical(AcceptanceRule):
    """A rule that accepts proposal d_i iff p(d_i) > min(threshold, alpha * exp(-H(p))), where p is
    the target's distribution. It then samples a token from p.

    H(p) is the entropy of p in nats, after temperature, top-k and top-p. Greedy decoding accepts
    only the target's choices.
    """

    judges_jointly = keeps_greedy = True
    remark = "likely proposals pass, so the text does not follow the target's distribution"

    def __init__(self, threshold: float, alpha: float) -> None:
        self.threshold = threshold
        self.alpha = alpha

    def decide(
        self,
        candidates: Candidates,
        target: TargetOutput,
        params: SamplingParams,
        noise: Noise | None,
    ) -> Verdict:
        c, k = candidates, candidates.token_ids.shape[1]
        if params.is_greedy:
            return Verdict(*ops.accept(c.token_ids, greedy_pick(target.logits), c.lens))
        assert noise is not None
        logits = target.logits.flatten(0, 1)
        own = draw(logits, None, params, noise.sample.flatten()).view(-1, k + 1)
        stands = self.stands(to_probs(target.logits[:, :k], params), c.token_ids)
        # `ops.accept` accepts a proposal if its noise is below its position's rate. Pass 0 or 1 as
        # the noise and 0.5 as the rate, so that it accepts exactly the proposals that pass.
        rates = torch.full((k,), 0.5, device=stands.device)
        return Verdict(*ops.accept(c.token_ids, own, c.lens, (~stands).float(), rates))

    def stands(self, probs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Return which proposals pass the test: bool [B, K].

        probs: the target's probabilities, fp32 [B, K, V].
        token_ids: the proposals, int64 [B, K]. Negative ids are padding; their results are
            meaningless.
        """
        entropy = torch.special.entr(probs).sum(dim=-1)
        p = probs.gather(-1, token_ids.clamp(min=0)[..., None])[..., 0]
        least = (self.alpha * (-entropy).exp()).clamp(max=self.threshold)
        return torch.gt(p, least)


RULE = Rule(lambda own: Typical(own.typical_threshold, own.typical_alpha))
