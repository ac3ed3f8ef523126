"""Where segments lie in a GPU's memory: books alone. In: what is to be there. Out: plans of moves and evictions."""
