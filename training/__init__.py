"""Training of EAGLE and MTP heads and drafters of blocks for a target that is there."""
