"""Reports on run folders: HTML, plots, tables, and a config to deploy."""
