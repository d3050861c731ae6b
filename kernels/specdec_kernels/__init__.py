"""Triton kernels for speculative decoding, each with a plain torch reference; see `ops`. Importing
this package does not import torch or triton."""
