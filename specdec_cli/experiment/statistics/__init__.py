"""Estimates, intervals and noise of measured rounds. Only samples are read."""
