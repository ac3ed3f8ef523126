"""The process that has all models. In: uploads of instances, what executors have written. Out: segments in host
memory, files, and manifests of who has what.
"""
