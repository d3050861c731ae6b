"""Ranks of a command: it starts and watches them, or joins those that run already.

Knows nothing of models or of what the ranks compute.
"""
