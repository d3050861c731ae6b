"""Draft heads that read the target's hidden states."""
