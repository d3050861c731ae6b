"""Plans, measures and records a sweep over proposal lengths, and computes its results."""
