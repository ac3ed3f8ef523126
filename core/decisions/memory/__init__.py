"""The one model of a GPU's memory, for executors and for the simulator: which segments are there, who shares them, and
what a wake evicts and must copy. In come models (instances and their segments), wakes and what an eviction would cost;
out come changes that a device carries out, or a simulation counts. No bytes move here, and nothing knows of torch.
"""
