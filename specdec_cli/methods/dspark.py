"""Proposing tokens with a DSpark drafter. It runs one pass over a block, as DFlash does. Then it
draws the tokens one after another, with a Markov head that adjusts the logits."""

from specdec_cli.methods.dflash import METHOD

__all__ = ["METHOD"]
