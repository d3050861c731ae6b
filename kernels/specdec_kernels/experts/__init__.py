"""Mixtures of experts: routing, the matmuls of the chosen experts, and their weighted sum."""
