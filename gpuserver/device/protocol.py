"""The executor's interface to one GPU: HostDevice emulates it, CudaDevice drives a real one.

Deliberately absent: residency, leases and commands. A device knows offsets in its pool's address space, slabs and
other GPUs by number, and streams: one compute stream, on which torch runs and which the calling (device) thread issues
to, and copy streams. Nothing here says that torch's device is the CPU, that a pointer can be read by the host, or that
waiting blocks the caller: :meth:`Device.wait` orders the compute stream after an event, which blocks the thread only
where the thread *is* the stream.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, cast

import torch

from dormouse.core.decisions.memory.pools.protocol import Mapping, Pool
from dormouse.core.decisions.memory.transfer import Copy, Kind
from dormouse.core.shm import SharedMemory
from dormouse.schemas.errors import DormouseError
from dormouse.schemas.messages import DeviceInfo, GpuPlace

POISON: Final = 0xFF
"""Overwrites released memory: every float type reads 0xFF bytes as NaN, every integer type as -1 or its largest value.
"""


class DeviceError(DormouseError):
    """The device refused a call and can go on: no memory for it, no such peer. Nothing was done."""


class DeviceLost(DormouseError):
    """The device can no longer be trusted (a sticky error): the executor must be replaced."""


Storages = list[torch.UntypedStorage]

Capture = Callable[[Callable[[], Storages]], Callable[[], Storages]]
"""Makes a function that computes the same again, with inputs and results at the same addresses. Raises RuntimeError if
that cannot be captured.
"""


class Exported(NamedTuple):
    """Access to a pool for another executor: ``handle`` travels as bytes, the descriptors beside it."""

    handle: bytes
    descriptors: list[int]


class DeviceEvent(Protocol):
    """A point on a stream."""

    def done(self) -> bool:
        """Whether the stream has passed it; never blocks."""


class CopyJob(Protocol):
    """Copies under way, in order, on a copy stream."""

    @property
    def events(self) -> Sequence[DeviceEvent]:
        """One per copy: passed when all its bytes are there."""

    def cancel(self) -> None:
        """Begin no further chunk. Events of copies that are not complete never pass, and ``on_done`` is not called."""

    def join(self) -> None:
        """Block the host until the last chunk that was begun has finished."""


def storage_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over foreign memory: no owner, nothing is freed with it. Private, but there in torch 2.11 to 2.13, and
    the only way that takes every dtype (2.5 us).
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return cast("torch.UntypedStorage", storage)  # torch's stubs say Storage


def computed_again(compute: Callable[[], Storages]) -> Callable[[], Storages]:
    """A `Capture` where the calling thread is the GPU."""
    compute()
    return compute


class Device(Protocol):
    """One GPU with a pool of ``pool_nbytes`` of memory reserved at start.

    Used by the device thread, except :meth:`copy_in` and methods that say so.
    """

    info: DeviceInfo
    place: GpuPlace | None  # among the machine's GPUs; None if emulated
    ordinal: int  # among the GPUs that CUDA shows; -1 if emulated
    torch_device: torch.device
    pool_nbytes: int
    activation_nbytes: int  # memory of their own, if they have any
    context_nbytes: int  # of GPU memory that a process's context takes; 0: emulated
    beside_nbytes: int  # of GPU memory that is nobody's budget: for contexts of runtimes, and loads of libraries
    strategy: str  # of the pool: "regions", "pages" or "buddy"
    approximate: bool  # activations are estimated, not counted
    activations_share_pool: bool  # memory that models occupy is not free for activations; else they have their own
    captures: bool  # captured work is given to the GPU at once, which is faster than call by call
    on_trouble: Callable[[str], None]  # settable; called from any thread with a text about what could work better
    on_lost: Callable[[DeviceLost], None]  # settable; called at most once, from a thread that alone may have noticed

    def make_pool(self) -> Pool:
        """An empty pool for this device's memory, of the strategy that it was opened with."""

    def attach_thread(self) -> None:
        """Make the calling thread the device thread: current device, stream, thread count, activation limit; and load
        libraries for which the first request would otherwise wait.
        """

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """A view of a span of the pool, without ownership: the caller keeps the span alive as long as the storage is
        used.
        """

    def contains(self, pointer: int, nbytes: int) -> bool:
        """Whether ``[pointer, +nbytes)`` is memory of this device: inside the pool, or a counted activation."""

    def map_host(self, slab: int, memory: SharedMemory) -> None:
        """Make a slab known to the copy stream. Owns ``memory`` from now on. Where it matters it is pinned, behind
        everything else, if it is pinnable. Any thread.
        """

    def unmap_host(self, slab: int) -> None:
        """Nothing is copied from or to it any more, except copies under way."""

    def settle(self) -> None:
        """Wait until slabs are pinned or given back, as far as they can be: for benchmarks and tests."""

    def export(self) -> Exported:
        """The arguments of ``map_peer`` of another executor. The caller closes the descriptors. Raises DeviceError."""

    @property
    def address_nbytes(self) -> int:
        """Of the pool's address space."""

    def granule(self, physical: int, writable: bool) -> int:
        """For runtimes: a descriptor of the exported memory that begins there, for reading only or for both, which is
        the caller's. Raises DeviceError where other processes cannot have one.
        """

    def host_storage(self, slab: int, start: int, nbytes: int, touched_nbytes: int) -> torch.UntypedStorage | None:
        """Bytes of a slab as a kernel on the compute stream can read them over the link, without ownership; None where
        that cannot be done. ``touched_nbytes``: about how many of them the kernel will read.
        """

    def map_peer(self, gpu: int, nbytes: int, handle: bytes, descriptors: Sequence[int]) -> None:
        """Make another executor's exported pool of ``nbytes`` readable to the copy stream; replaces that number's
        former one. The descriptors stay the caller's. Any thread.

        Raises DeviceError if that GPU cannot be reached.
        """

    def drop_peer(self, gpu: int) -> None:
        """That executor is gone; a copy that still reads its memory ends first. Any thread."""

    def remap(self, unmapped: Sequence[Mapping], mapped: Sequence[Mapping]) -> None:
        """Take granules from addresses, then put granules at addresses; pools of pages only.

        An address range is unmapped only after everything that the compute stream was given so far.

        Raises DeviceError; mappings from before the call stay.
        """

    def copy_in(self, copies: Sequence[Copy], on_done: Callable[[], None], after: DeviceEvent | None = None) -> CopyJob:
        """Slabs, peers or the pool itself to the pool on a copy stream, not before the work that the compute stream
        has; with ``after``, which :meth:`record` gave, not before that: the part of a wake that comes late need not
        wait for the part that already runs. Jobs are carried out in the order in which they were given. Any thread.

        ``on_done`` is called from any thread after the last chunk, and before ``join`` returns.

        Raises ValueError for bytes outside a slab, a peer or the pool; DeviceError.
        """

    def copy_out(self, copies: Sequence[tuple[torch.UntypedStorage, int, int]]) -> None:
        """Storages to slabs: ``(storage, slab, offset)``; returns when the bytes have arrived."""

    def read_back(self, slab: int, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Bytes of a slab in memory of their own outside the pool, on the compute stream. Raises
        ``torch.OutOfMemoryError``.
        """

    def wait(self, event: DeviceEvent) -> None:
        """The compute stream goes on only after ``event``."""

    def record(self) -> DeviceEvent:
        """A point on the compute stream after everything issued so far."""

    def synchronize(self) -> None:
        """Block the host until the compute stream has done everything. Raises DeviceLost."""

    def poison(self, offset: int, nbytes: int) -> None:
        """Overwrite a span that was given up, if so configured, so that a stale read cannot look right."""

    def bandwidth(self, kind: Kind) -> float:
        """Bytes per second that copies over this kind of link have lately reached; an assumption before the first."""

    def set_activation_limit(self, nbytes: int) -> None:
        """Most bytes outside the pool from now on; an operation beyond raises ``torch.OutOfMemoryError``."""

    def set_owner(self, number: int) -> None:
        """The owner of all activations from now on, counted from 1. None sees bytes of others in free memory."""

    def new_capture(self) -> Capture:
        """With memory that no other has a part of."""

    def relieve(self) -> bool:
        """Give up memory that is kept beside the activations only to be faster. Returns whether there was any: then the
        operation that was out of memory may be tried again.
        """

    def activation_stats(self) -> tuple[int, int, int]:
        """``(used, peak since the last reset, free)`` in bytes."""

    def refused(self) -> tuple[int, int]:
        """``(nbytes, in use)``: bytes that the calling thread was last refused for activations, and bytes that were in
        use when that happened; zeros if nothing was since the last call, or where that is not known.
        """

    def reset_peak(self) -> None: ...

    def close(self) -> None: ...
