"""Models: transformers' own classes with our loader, checks and paged attention."""
