"""A DSpark drafter (DeepSpec): DFlash's backbone with a Markov head and a confidence head.

The row at an anchor decides the token after it, so that a block of B rows proposes B tokens.
"""

from scripts.speculators.kinds import dflash
from scripts.speculators.kinds.base import Options
from scripts.speculators.markov import Heads
from scripts.speculators.target import Target

OPTIONS = (*dflash.OPTIONS, "rank")


def make(target: Target, options: Options) -> dflash.DFlash:
    return dflash.DFlash(target, options, Heads(options.rank))
