"""Triton kernels for speculative decoding, each with a plain torch reference; see `ops`. Importing
the package loads neither torch nor triton."""
