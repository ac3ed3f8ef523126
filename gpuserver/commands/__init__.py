"""The operations that an instance may run on a GPU, and their execution. In: frames, which may be hostile. Out:
operations on storages and replies, or a protocol violation.
"""
