"""Kernels that read and write the memory of other GPUs and of the host."""
