"""Run folders turned into something to look at: HTML, plots, tables, a config to deploy."""
