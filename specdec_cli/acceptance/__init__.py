"""Acceptance rules, one per file. The round refers to none of them by name."""
