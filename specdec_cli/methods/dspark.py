"""Proposing tokens with a DSpark drafter: a pass as in DFlash, and then a Markov head with which
tokens are drawn one after another."""

from specdec_cli.methods.dflash import METHOD

__all__ = ["METHOD"]
