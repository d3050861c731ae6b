"""Acceptance rules, a file each. A round knows none of them by name."""
