"""Data types below models: sequences, batches, caches, a batch's state, ranks."""
