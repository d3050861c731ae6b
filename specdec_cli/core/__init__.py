"""Nouns below models: sequences, batches, caches, a batch's state, ranks."""
