"""Where functions run. In: who is to be forked, with which limits. Out: confined processes, and how they ended."""
