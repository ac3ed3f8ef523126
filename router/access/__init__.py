"""Access control. In: the statements of a request or a connection about its caller. Out: a caller with its rights, or a
refusal.
"""
