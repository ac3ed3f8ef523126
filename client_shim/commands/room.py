"""Memory room on the GPU as shown to functions: results that may not fit, the program's own limit, and the count of
failures.

Knows numbers only: the stream counts the bytes held.
"""

from typing import Final

import torch

LARGE_SHARE: Final = 8
"""A command that makes more than one part in so many of a GPU's memory may not fit, and is waited for: a program that
catches `OutOfMemoryError` tries again with less. The next answer reports smaller ones that do not fit."""


class Room:
    """Of this process."""

    large_nbytes = 1 << 40
    allowed_nbytes = 1 << 62  # `torch.cuda.set_per_process_memory_fraction`
    refused = 0  # since the start, or since the program set it back


def out_of_memory(text: str) -> torch.OutOfMemoryError:
    """To be raised: it is counted as if it was."""
    Room.refused += 1
    return torch.OutOfMemoryError(text)


def expect_allowed(held_nbytes: int, nbytes: int) -> None:
    """Refuse ``nbytes`` more than is held, if the program said so itself."""
    if nbytes and held_nbytes + nbytes > Room.allowed_nbytes:
        raise out_of_memory(
            f"CUDA out of memory. Tried to allocate {nbytes / 2**20:.2f} MiB. GPU 0 has room, but "
            f"{held_nbytes / 2**20:.2f} MiB are allocated, and torch.cuda.set_per_process_memory_fraction() allows "
            f"{Room.allowed_nbytes / 2**20:.2f} MiB"
        )
