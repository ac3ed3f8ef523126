"""What a runtime of a language model computes next: sequences in a step, and the blocks of KV that they have."""
