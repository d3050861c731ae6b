"""Triton kernels for speculative decoding, each with a plain torch reference; see `ops`. Importing
this package imports neither torch nor triton."""
