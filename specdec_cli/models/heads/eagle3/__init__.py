"""EAGLE-3 heads (Li et al., arXiv 2503.01840): a decoder of few layers that reads hidden states of
the target beside embeddings of tokens."""
