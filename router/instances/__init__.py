"""What instances and sessions have outside their processes. In: who starts and who ends. Out: directories, arenas,
links and logs, and what the zygote says of them.
"""
