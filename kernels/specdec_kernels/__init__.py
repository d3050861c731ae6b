"""Triton kernels of speculative decoding, each beside a plain torch reference; see `ops`. Importing
the package loads neither torch nor triton."""
