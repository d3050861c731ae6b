"""Measurements, their records and conclusions: sweeps, comparisons and memory profiles."""
