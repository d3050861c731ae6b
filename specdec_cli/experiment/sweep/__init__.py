"""A sweep over proposal lengths: planned, measured, recorded and shown."""
