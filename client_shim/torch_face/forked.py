"""Refuses cuda in a process that user code has forked, in PyTorch's own words.

The child has the parent's links, lease and locks, but not the threads behind them, and executors would take its writes
into the arena for the parent's. So the child's stream is one that refuses, and the runner ends a child that comes back
from user code. Forks of the zygote are not meant: they happen before a stream exists.
"""

import os
from typing import Any, Final

import torch

from dormouse.client_shim.commands import recorder
from dormouse.client_shim.patches import nothing, patch, raising
from dormouse.client_shim.stream.stream import Stream
from dormouse.client_shim.torch_face.remote_tensor import world

REFUSAL: Final = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start "
    "method. (On Dormouse, only the process that loaded the function or runs the script has a GPU: let its children "
    "work on CPU tensors.)"
)


_refuse = raising(REFUSAL)


class ForkedStream(Stream):
    """Put in the place of a stream's class, so that all who hold it meet the refusal. Frees that finalizers note are
    read by nobody here.
    """

    def __getattribute__(self, name: str) -> Any:
        if name == "seed":  # PyTorch keeps seeds of a CUDA that is not initialized for later
            return nothing
        _refuse()


def _in_child() -> None:
    if world.stream is None:
        return
    recorder.disconnect()
    world.stream.__class__ = ForkedStream
    patch(torch.cuda, "_is_in_bad_fork", lambda: True)
    patch(torch.cuda, "is_initialized", lambda: False)
    for name in ("init", "_lazy_init", "current_device", "set_device", "synchronize", "current_stream"):
        patch(torch.cuda, name, _refuse)


_watching = False


def watch_forks() -> None:
    """From now on, for good; can be repeated."""
    global _watching
    if not _watching:
        os.register_at_fork(after_in_child=_in_child)
        _watching = True
