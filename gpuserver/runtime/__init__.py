"""The runtime of a language model: a process per GPU, backbone and trust group, which computes tokens from tokens.

In: a checked description of the model, memory with its weights, memory for KV, token ids with sampling parameters, and
turns. Out: token ids, and requests for memory. It never sees a folder, a template or text.
"""
