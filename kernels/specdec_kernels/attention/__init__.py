"""Attention over a paged KV cache; README.md has the path that each call takes.

`softmax_triton` (tiles of keys), `split_triton` (contexts cut into parts) and `rope_triton` (heads
of the projection) are pieces of `decode_triton`, `tiles` its launch configuration. `cache` has the
slots.
"""
