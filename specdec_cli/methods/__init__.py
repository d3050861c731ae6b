"""Proposers, a file each. The engine knows none of them by name."""
