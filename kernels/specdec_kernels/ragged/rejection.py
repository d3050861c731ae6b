"""Rejection sampling and draws over finished probabilities, on CUDA by Triton."""

from specdec_kernels.dispatch import kernel
from specdec_kernels.sampling.rejection import (
    rejection_sample_reference,
    sample_categorical_reference,
)

_TRITON = "specdec_kernels.ragged.rejection_triton"
rejection_sample = kernel(f"{_TRITON}:rejection_sample_triton")(rejection_sample_reference)
sample_categorical = kernel(f"{_TRITON}:sample_categorical_triton")(sample_categorical_reference)
