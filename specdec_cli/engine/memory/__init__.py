"""Determines how much memory a run needs on each rank: estimated from configs, or measured."""
