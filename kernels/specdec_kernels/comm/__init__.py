"""Memory of other GPUs and of the host."""
