"""From logits to tokens: distributions, draws, rejection sampling, block verification, noise."""
