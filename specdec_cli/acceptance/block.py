"""Block verification (Sun et al., arXiv 2403.10444): proposals are judged jointly.

The rule is lossless like rejection sampling, and in expectation accepts as many proposals or more.
"""

from functools import partial

from specdec_kernels import ops

from specdec_cli.acceptance.base import LosslessRule, NoForecast, Rule
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.types import SamplingParams


class Block(LosslessRule):
    """Accept the longest prefix of the proposals that passes a test of its joint probability.

    A longer prefix may pass even if a shorter one does not, so a decision depends on proposals past
    the last accepted one. In greedy decoding the rule equals rejection sampling.
    """

    looks_ahead = True
    test = staticmethod(partial(ops.reject_logits, by_block=True))

    def forecast(
        self, index: int, start: int, count: int, k: int, params: SamplingParams
    ) -> Forecast | None:
        """None in greedy decoding; otherwise chances of single tokens do not predict this rule."""
        if params.is_greedy:
            return None
        raise NoForecast


RULE = Rule(lambda _: Block())
