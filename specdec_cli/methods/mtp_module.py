"""Proposing tokens with an MTP module that lies in a folder of its own."""

from specdec_cli.methods.mtp import METHOD

__all__ = ["METHOD"]
