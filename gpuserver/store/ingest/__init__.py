"""Ingestion of a model. In: uploads, offers and commits of one instance, and write-backs of executors. Out: its
segments, and the versions of its manifest.
"""
