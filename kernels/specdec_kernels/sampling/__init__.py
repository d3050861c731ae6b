"""From logits to tokens: distributions, sampling, rejection sampling, block verification, noise."""
