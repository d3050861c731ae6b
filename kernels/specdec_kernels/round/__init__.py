"""The device's steps in a speculative round: pass inputs, greedy acceptance, state update, n-gram
lookup."""
