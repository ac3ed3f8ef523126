"""State that all instances share: the segments and their holders, and the slabs of host memory that they lie in. In:
bytes, their holders and readers. Out: their places, and the free room.
"""
