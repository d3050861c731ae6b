"""Output on terminals: text, tables, progress. Computes nothing."""
