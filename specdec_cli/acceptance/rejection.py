"""Modified rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318)."""

from specdec_kernels import ops

from specdec_cli.acceptance.base import LosslessRule, Rule


class Rejection(LosslessRule):
    """A rule that accepts proposal d_i iff u_i * q(d_i) < p(d_i), for noise u_i, draft q and target
    p. It then samples a token from norm(max(p - q, 0)), or from p if all proposals are accepted."""

    test = ops.reject_logits


RULE = Rule(lambda _: Rejection())
