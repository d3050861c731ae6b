"""One module per command. Each parses, resolves the recipe, runs, and shows the results."""
