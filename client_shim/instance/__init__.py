"""The process that runs a function, or a user's program. In: requests. Out: answers."""
