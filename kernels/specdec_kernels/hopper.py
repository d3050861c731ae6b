"""An H100 or H200, which what is chosen from shapes is chosen for."""

MULTIPROCESSORS = 132
SHARED_MEMORY = 227 * 1024  # bytes that a program can have
CACHE_LINE = 128  # bytes
