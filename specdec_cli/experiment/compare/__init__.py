"""`specdec compare-tp`: measures every pair of a target TP and a draft TP, each in its own
ranks."""
