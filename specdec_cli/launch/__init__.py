"""Starts and watches the ranks of a command, or joins ranks that are already running.

It does not depend on models or on what the ranks compute.
"""
