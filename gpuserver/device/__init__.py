"""One GPU, real or emulated, behind one protocol. In: requests to map, copy and count. Out: storages, or the reason for
a refusal.
"""
