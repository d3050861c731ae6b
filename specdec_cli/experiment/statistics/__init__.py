"""Estimates, intervals and noise of measured rounds. Reads samples; knows no engine."""
