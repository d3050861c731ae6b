"""Determines how much memory a run needs on each rank, by estimating it from the models' configs or
by measuring it."""
