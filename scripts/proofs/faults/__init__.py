"""Faults for `scripts/proofs/mutants.py`, with a file for each part of the code."""
