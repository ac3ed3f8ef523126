"""State and transitions of the leases on one GPU: decisions alone. In: events. Out: effects. No torch, no thread, no
clock.
"""
