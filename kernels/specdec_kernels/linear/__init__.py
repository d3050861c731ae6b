"""Matmuls of a decoder layer, with the norm, gate and sum around them."""
