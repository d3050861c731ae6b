"""Kernels that read the memory of other GPUs."""
