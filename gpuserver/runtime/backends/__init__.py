"""Ways to compute attention over the block table, by device."""
