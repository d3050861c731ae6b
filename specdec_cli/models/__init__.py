"""Models: transformers' own classes behind our loader, gate and paged attention."""
