"""Matmuls of a decoder layer, with the norm, gate and residual around them."""
