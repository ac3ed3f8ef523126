"""All that a node decides, a room for each: requests (the router), scheduling (the controller), leases (executors),
batches (runtimes of language models), memory (executors and the simulator). Pure: what happens comes in with the time,
what is to be done goes out. The processes carry it out; the simulator runs the same code on another clock.
"""
