"""One instance on one GPU: its interpreter, and the manifest that it is bound to. Compute thread only."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

import torch

from dormouse.core.decisions.leases import events as e
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.commands.interpreter import FindFastPath, Interpreter, InterpreterDevice
from dormouse.gpuserver.commands.storages import CommandFailed, StorageFailure
from dormouse.gpuserver.device.protocol import Capture, Device
from dormouse.gpuserver.executor.arrivals import Board
from dormouse.schemas import messages as m


class InstanceDevice:
    """The device as interpreters see it. ``relieve``: see `Compute.relieve`."""

    def __init__(self, device: Device, relieve: Callable[[], str | None], capture: Capture | None) -> None:
        self._device = device
        self.relieve = relieve
        self.capture = capture
        self.torch_device = device.torch_device
        self.contains = device.contains
        self.synchronize = device.synchronize
        self.activation_stats = device.activation_stats

    def generator(self) -> torch.Generator:
        return torch.Generator(self.torch_device)


class ExecutorInstance:
    """Keeps the interpreter's table in step with the manifest and with residency."""

    def __init__(
        self,
        attach: m.AttachInstance,
        arena: SharedMemory,
        device: InterpreterDevice,
        number: int,
        find_fast: FindFastPath,
    ) -> None:
        self.name: Final = attach.instance
        self.number: Final = number  # as the owner of activations: never another instance's
        self.owner: Final = attach.tenant
        self.arena = arena
        layout = attach.arena
        self.interpreter = Interpreter(
            device, arena.view[layout.stream_offset : layout.stream_offset + layout.stream_nbytes], find_fast
        )
        self.manifest = m.Manifest(instance=attach.instance, version=0, entries=[], segments=[])
        self.entries: dict[int, list[m.Entry]] = {}  # by segment, of ``manifest``
        self.known: frozenset[int] = frozenset()  # its storages
        self.claimed: dict[int, int] = {}  # written in place by this lease: the segments' new numbers
        self.used: dict[int, None] = {}  # segments that this lease has brought to the interpreter, in that order
        self.board: Board | None = None  # of this lease's wake, while that goes on
        self._own: set[int] = set()  # known storages that are this lease's: changed elsewhere than in the pool, or lost
        self._bound: dict[int, int] = {}  # segment by storage: those within the interpreter's reach

    def counts(self) -> e.Counts:
        """Ever."""
        return e.Counts(self.interpreter.repaired_strides, self.interpreter.capture_counts.replayed)

    def adopt(self, manifest: m.Manifest) -> None:
        """The manifest from now on."""
        self.manifest = manifest
        self.entries = {}
        for entry in manifest.entries:
            self.entries.setdefault(entry.segment, []).append(entry)
        current = {entry.storage: entry.segment for entry in manifest.entries}
        self.known = frozenset(current)
        self.unbind(storage for storage, segment in list(self._bound.items()) if current.get(storage) != segment)

    def bind_all(
        self,
        device: Device,
        places: Mapping[int, tuple[int, int]],
        board: Board | None,
        may_write: Callable[[int], int | None],
    ) -> None:
        """Bring the whole manifest, whose segments are at ``places``, within the interpreter's reach; first use of a
        segment that is on its way waits for it. ``may_write``: see `MayWrite` of leases/events.py.
        """
        self.board = board
        gone = self._own | self.interpreter.table.freed_persistent.keys()
        for segment, entries in self.entries.items():
            coming = board if board is not None and board.arrival(segment) is not None else None
            offset, nbytes = places[segment]
            for entry in entries:
                if entry.storage not in gone and (coming is not None or self._bound.get(entry.storage) != segment):
                    # A pack of which one storage remains is still not that storage.
                    alone = len(entries) == 1 and entry.nbytes == nbytes
                    self._bind(device, entry, offset + entry.offset, coming, may_write if alone else None)

    def bind_none(self, failure: StorageFailure) -> None:
        """The model cannot be here: any use of it fails with this."""

        def materialise() -> torch.UntypedStorage:
            raise CommandFailed(failure)

        self.unbind(list(self._bound))
        for entry in self.manifest.entries:
            self.interpreter.table.bind(entry.storage, entry.nbytes, materialise)

    def _bind(
        self,
        device: Device,
        entry: m.Entry,
        offset: int,
        coming: Board | None,
        claim: Callable[[int], int | None] | None,
    ) -> None:
        segment, arrival = entry.segment, coming.arrival(entry.segment) if coming is not None else None

        def materialise() -> torch.UntypedStorage:
            self.used.setdefault(segment)
            if arrival is not None:
                arrival.wait(device)
            return device.storage(offset, entry.nbytes)

        def may_write(grows: bool) -> bool:
            if segment in self.claimed and not grows:
                return True
            if claim is not None and not grows and (number := claim(segment)) is not None:
                self.claimed[segment] = number
                return True
            self.keep(entry.storage)  # from now on it is a copy that only this lease knows
            return False

        self._bound[entry.storage] = segment
        direct = partial(coming.direct, segment, entry.offset, entry.nbytes) if coming is not None else None
        self.interpreter.table.bind(entry.storage, entry.nbytes, materialise, may_write, direct)

    def keep(self, storage: int) -> None:
        """The interpreter has it, wherever its segment goes, until the lease is over."""
        self._bound.pop(storage, None)
        self._own.add(storage)

    def over(self) -> list[int]:
        """The lease is; returns the claimed segments that nobody has asked for."""
        dropped, self.claimed, self._own = list(self.claimed.values()), {}, set()
        return dropped

    def claim_of(self, storage: int) -> int | None:
        """The claimed segment in which a storage lies; None for one that lies elsewhere."""
        segment = self._bound.get(storage)
        return None if segment is None else self.claimed.get(segment)

    def unbind(self, storages: Iterable[int]) -> None:
        """Take storages out of the interpreter's reach."""
        gone = list(storages)
        self.interpreter.table.unbind(gone)
        for storage in gone:
            self._bound.pop(storage, None)

    def unbind_segments(self, segments: Iterable[int]) -> None:
        """These segments are not where they were; those that the wake has failed to bring never were."""
        for segment in segments:
            if segment in self.claimed:
                continue  # that is another's copy: ours has a number of its own
            failed = self.board is not None and self.board.failed(segment)
            for entry in self.entries.get(segment, ()):
                if self._bound.get(entry.storage) == segment:  # else it has become a copy that is still there
                    if failed:
                        self.keep(entry.storage)  # its users get the reason
                    else:
                        self.unbind([entry.storage])

    def close(self) -> None:
        """Unmap the arena. Explicitly: interpreters are cycles, and a copy that ended last may still know the lease."""
        self.unbind(list(self._bound))
        self.interpreter.close()
        self.arena.close()
