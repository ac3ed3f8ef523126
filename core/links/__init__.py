"""Messages between two processes. In: a path, and the types of messages. Out: each message, whole and in order."""
