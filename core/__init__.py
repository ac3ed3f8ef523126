"""Code that every process of a node shares, whatever its role: start-up, paths, shared memory, keys."""
