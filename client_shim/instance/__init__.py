"""A process that runs a function, or a program of one's own. In: requests. Out: answers."""
