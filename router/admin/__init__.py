"""Administration. In: acts, over the admin socket or HTTP, and the files of a deploy. Out: snapshots, answers, and
lines in the audit log.
"""
