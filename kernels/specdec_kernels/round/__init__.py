"""The steps of a speculative round that run on the device: inputs of a pass, greedy acceptance,
state update, n-gram lookup."""
