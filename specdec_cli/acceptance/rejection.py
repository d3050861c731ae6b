"""Modified rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318)."""

from specdec_kernels import ops

from specdec_cli.acceptance.base import LosslessRule, Rule


class Rejection(LosslessRule):
    """Accept d_i iff u_i * q(d_i) < p(d_i). Then sample a token from norm(max(p - q, 0)), or from p
    if all are accepted."""

    test = ops.reject_logits


RULE = Rule(lambda _: Rejection())
