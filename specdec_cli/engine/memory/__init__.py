"""The memory that a run takes on each rank: estimated from configs, or measured."""
