"""EAGLE-3 heads (Li et al., arXiv 2503.01840): decoders with a few layers, which read the target's
hidden states and the embeddings of tokens."""
