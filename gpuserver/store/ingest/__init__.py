"""How a model comes in. In: what one instance uploads, offers and commits, what executors have written back. Out: its
segments, and the versions of its manifest.
"""
