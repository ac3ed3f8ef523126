"""Decisions of a language model's runtime: the sequences of the next step, and the blocks of KV that they have."""
