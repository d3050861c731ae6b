"""Ranks of a command, which starts and watches them or joins ranks that run already.

Knows nothing of models or of what the ranks compute.
"""
