"""What every process of a node needs, whatever it does: how it starts, where things are, shared memory, keys."""
