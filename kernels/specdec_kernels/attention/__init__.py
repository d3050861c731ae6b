"""Attention over a paged KV cache.

`paged` and `paged_triton` are attention alone, for any number of queries. `rope` and
`decode_triton` are a layer's rotary embedding, cache write and attention in one, for few queries;
`softmax_triton` (tiles of keys), `split_triton` (contexts cut into parts) and `rope_triton` (heads
of the projection) are its pieces, `tiles` its launch configuration. `cache` has the slots.
"""
