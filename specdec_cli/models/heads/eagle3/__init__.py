"""EAGLE-3 heads: their checkpoints, and their passes over a paged cache.

EAGLE-3 (Li et al., arXiv 2503.01840) proposes tokens with a decoder of one or a few layers that
reads hidden states of the target beside embeddings of tokens.
"""
