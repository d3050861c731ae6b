"""`specdec compare-tp`: measures every pair of a target TP degree and a draft TP degree. Each pair
is measured by its own set of rank processes."""
