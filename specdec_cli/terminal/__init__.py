"""Output on terminals: text, tables and progress."""
