"""Starts and watches the ranks of a command, or joins ranks that run already.

It knows nothing about models or about what the ranks compute.
"""
