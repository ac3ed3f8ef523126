"""Decisions of a node, one package per process: requests (the router), scheduling (the controller), leases (executors),
batches (runtimes of language models), memory (executors and the simulator). Pure: events come in with the time, effects
go out. The processes carry them out; the simulator runs the same code on another clock.
"""
