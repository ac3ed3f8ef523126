"""Model of a GPU's memory, for executors and for the simulator: which segments are there, which instances share them,
and what a wake evicts and must copy. In: models (instances and their segments), wakes and costs of evictions. Out:
changes that a device carries out, or a simulation counts. No bytes move here, and nothing depends on torch.
"""
