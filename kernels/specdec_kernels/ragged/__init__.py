"""What only rounds over ragged batches on CUDA use. Nothing else in the package imports it.

`ops.merge_tokens`, `ops.rejection_sample` and `ops.sample_categorical`.
"""
