"""The process that has all models. In: what instances upload, and what executors have changed and write back. Out:
manifests, which say of what segments a model is; where these lie in host memory; and files, in which models outlive
the process.
"""
