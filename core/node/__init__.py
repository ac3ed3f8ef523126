"""The node as a whole: the supervisor of its processes, and the command line. In: a node file and people's commands.
Out: processes that are started, watched and replaced; answers.
"""
