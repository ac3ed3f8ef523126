"""The scheduling core: pure. In comes what happens (`events`): requests, leases that end, what executors and the store
report. Out goes what is to be done. The controller's process and the simulator run the same `scheduler`.
"""
