"""What an instance may have done on a GPU. In: frames, which may be hostile. Out: operations on storages and replies,
or a protocol violation.
"""
