"""Proposing with a DSpark drafter: DFlash's pass, followed by draws from left to right with a
Markov head."""

from specdec_cli.methods.dflash import METHOD

__all__ = ["METHOD"]
