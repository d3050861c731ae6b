"""Acceptance rules, one per file. The engine refers to none of them by name."""
