"""What the executor needs from one GPU; HostDevice emulates it, a CUDA device will implement the same.

Deliberately absent: residency, leases and commands. A device knows offsets in its pool, slabs by number, and streams:
one compute stream, on which torch runs and which the calling (device) thread issues to, and one copy stream. Nothing
here says that torch's device is the CPU, that a pointer can be read by the host, or that waiting blocks the caller:
:meth:`Device.wait` orders the compute stream after an event, which blocks the thread only where the thread *is* the
stream.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.transfer import Copy
from dormouse.schemas.messages import DeviceInfo


class Event(Protocol):
    """A point on a stream."""

    def done(self) -> bool:
        """Whether the stream has passed it; never blocks."""


class CopyJob(Protocol):
    """Copies under way, in order, on the copy stream."""

    @property
    def events(self) -> Sequence[Event]:
        """One per copy: passed when all its bytes are there."""

    def cancel(self) -> None:
        """Begin no further chunk. Events of copies that are not complete never pass, and ``on_done`` is not called."""

    def join(self) -> None:
        """Block the host until the last chunk that was begun has finished."""


class Device(Protocol):
    """One GPU with a pool of ``pool_nbytes`` reserved at start. Used by one thread, the device thread."""

    info: DeviceInfo
    torch_device: torch.device
    pool_nbytes: int
    approximate: bool  # activations are estimated, not counted

    def attach_thread(self) -> None:
        """Make the calling thread the device thread: current device, stream, thread count, activation limit."""

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """A view of a span of the pool, without ownership: the caller keeps the span alive as long as the storage is
        used.
        """

    def contains(self, pointer: int, nbytes: int) -> bool:
        """Whether ``[pointer, +nbytes)`` is memory of this device: inside the pool, or a counted activation."""

    def map_host(self, slab: int, memory: SharedMemory) -> None:
        """Make a slab known to the copy stream (pins it where that matters). Owns ``memory`` from now on."""

    def unmap_host(self, slab: int) -> None: ...

    def copy_in(self, copies: Sequence[Copy], on_done: Callable[[], None]) -> CopyJob:
        """Slabs to pool on the copy stream, not before what the compute stream was given so far.

        ``on_done`` is called from any thread after the last chunk, and before ``join`` returns.
        """

    def copy_out(self, copies: Sequence[tuple[torch.UntypedStorage, int, int]]) -> None:
        """Storages to slabs: ``(storage, slab, offset)``; returns when the bytes have arrived."""

    def wait(self, event: Event) -> None:
        """The compute stream goes on only after ``event``."""

    def record(self) -> Event:
        """A point on the compute stream after everything issued so far."""

    def poison(self, offset: int, nbytes: int) -> None:
        """Overwrite a span that was given up, if so configured, so that a stale read cannot look right."""

    def set_activation_limit(self, nbytes: int) -> None:
        """Most bytes outside the pool from now on; an operation beyond raises ``torch.OutOfMemoryError``."""

    def activation_stats(self) -> tuple[int, int, int]:
        """``(used, peak since the last reset, free)`` in bytes."""

    def reset_peak(self) -> None: ...

    def close(self) -> None: ...
