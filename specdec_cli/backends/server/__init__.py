"""Engines behind HTTP as a backend. Imports no torch."""
