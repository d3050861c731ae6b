"""Faults for `scripts/proofs/mutants.py`, a module a room of the code."""
