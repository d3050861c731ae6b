"""`specdec compare-tp`: a target and a draft at every pair of degrees, each in ranks of its own."""
