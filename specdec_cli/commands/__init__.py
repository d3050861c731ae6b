"""One module a command: parse, resolve the recipe, run, render."""
