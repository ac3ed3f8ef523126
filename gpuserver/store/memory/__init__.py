"""What all instances share: which segments there are and whose they are, and the slabs of host memory that they lie in.
In: bytes, who holds and who reads them. Out: where they lie, and what is free.
"""
