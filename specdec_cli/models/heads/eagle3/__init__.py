"""EAGLE-3 heads (Li et al., arXiv 2503.01840): decoders of few layers that read hidden states of
the target and embeddings of tokens."""
