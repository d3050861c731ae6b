"""Acceptance rules, a file each. Nothing outside this folder knows the name of one."""
