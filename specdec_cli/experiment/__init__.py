"""Measuring, keeping and concluding: sweeps, comparisons, memory profiles. Knows no terminal."""
