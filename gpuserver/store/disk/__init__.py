"""The lower tier: segments in files, and the index of them. In: segments that are to outlive the process, or to make
room. Out: their bytes again, and the file ranges that are known.
"""
