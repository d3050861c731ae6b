"""A speculative round on the device: pass inputs, greedy acceptance, state update, n-grams."""
