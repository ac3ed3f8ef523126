"""Resources of instances and sessions outside their processes. In: starts and ends. Out: directories, arenas, links and
logs, and the zygote's reports of them.
"""
