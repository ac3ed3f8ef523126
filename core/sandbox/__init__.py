"""The sandbox of functions. In: the process to fork, and its limits. Out: confined processes, and how they ended."""
