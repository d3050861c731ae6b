"""Acceptance rules, one per module. The engine uses only their common interface, in `base`, and
never refers to a particular rule."""
