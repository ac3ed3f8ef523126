"""The process that owns one GPU. In: wakes from the controller, frames from instances, bytes from the store. Out:
outcomes of leases, replies, new bytes of models.
"""
