"""Reports on run folders: HTML, plots, tables, and a config for deployment."""
