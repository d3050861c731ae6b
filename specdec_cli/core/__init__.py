"""Data types that models and the engine share: sequences, batches, KV caches, and the ranks that
share a model."""
