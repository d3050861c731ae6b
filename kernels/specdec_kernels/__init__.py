"""Triton kernels of speculative decoding, each beside a plain torch reference.

Import `specdec_kernels.ops` for the public functions. Nothing here knows about models, engines or
processes, and importing the package loads neither torch nor triton.
"""
