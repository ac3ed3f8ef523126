"""The scheduling core: pure. In: events (`events`): requests, leases that end, reports of executors and the store. Out:
actions. The controller's process and the simulator run the same `scheduler`.
"""
