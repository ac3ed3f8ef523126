"""The process that has all models. In: uploads of instances, and changes that executors write back. Out: manifests,
which list the segments of a model; the places of these in host memory; and files, in which models outlive the process.
"""
