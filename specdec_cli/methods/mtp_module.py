"""Proposing tokens with an MTP module in its own folder."""

from specdec_cli.methods.mtp import METHOD

__all__ = ["METHOD"]
