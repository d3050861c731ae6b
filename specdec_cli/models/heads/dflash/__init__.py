"""DFlash (z-lab, arXiv 2602.06036) and DSpark (DeepSpec): heads that draft a block in one pass."""
