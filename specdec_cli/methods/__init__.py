"""The methods that propose tokens, one per file. The engine never refers to a method by name."""
