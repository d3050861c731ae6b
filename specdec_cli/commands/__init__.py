"""One module per command. Each command parses its options, resolves the recipe, runs the experiment
and shows the results."""
