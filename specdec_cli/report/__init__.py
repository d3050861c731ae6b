"""Run folders turned into something to look at: HTML, plots, tables, a config to deploy."""

import os

# Figures are drawn without a display. matplotlib cannot be imported with an unknown name here.
os.environ["MPLBACKEND"] = "agg"
