"""Places of segments in a GPU's memory: books alone. In: the wanted segments. Out: plans of moves and evictions."""
