"""Memory of a run on each rank: estimated from configs, and measured."""
