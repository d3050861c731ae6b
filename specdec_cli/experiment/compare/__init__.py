"""`specdec compare-tp`: a target and a draft at every pair of degrees, each pair in its own
ranks."""
