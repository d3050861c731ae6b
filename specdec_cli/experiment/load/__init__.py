"""Measures requests that arrive at a set rate: plans when they arrive, and evaluates what was
measured."""
