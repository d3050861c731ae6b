"""Proposers, a file each."""
