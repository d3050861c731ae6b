"""Proposing with a DSpark drafter: DFlash's pass, drawn from left to right by its Markov head."""

from specdec_cli.methods.dflash import METHOD

__all__ = ["METHOD"]
