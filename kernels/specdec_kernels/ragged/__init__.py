"""Functions that only ragged rounds on CUDA use; nothing but `ops` imports this package.

`ops.merge_tokens`, `ops.rejection_sample` and `ops.sample_categorical`.
"""
