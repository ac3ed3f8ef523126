"""Messages between two processes. In: a path, and what may be said. Out: each message, whole and in order."""
