"""The methods that propose tokens, one per file. The engine refers to none of them by name."""
