"""One instance on one GPU: its interpreter, the manifest it is bound to, and the lease it holds. Device thread only."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device import Device
from dormouse.gpuserver.interpreter import EndRequest, Interpreter, InterpreterDevice
from dormouse.gpuserver.lease.arrivals import Board
from dormouse.gpuserver.residency import Residency
from dormouse.gpuserver.storages import CommandFailed, Failure
from dormouse.schemas import messages as m


class Tenant:
    """Keeps the interpreter's table in step with the manifest and with what is resident."""

    def __init__(self, attach: m.AttachInstance, arena: SharedMemory, device: InterpreterDevice, number: int) -> None:
        self.name: Final = attach.instance
        self.number: Final = number  # as the owner of activations: never another instance's
        self.owner: Final = attach.tenant
        self.arena = arena
        layout = attach.arena
        self.interpreter = Interpreter(
            device, arena.view[layout.stream_offset : layout.stream_offset + layout.stream_nbytes]
        )
        self.manifest = m.Manifest(instance=attach.instance, version=0, entries=[], segments=[])
        self.newest = self.manifest  # what the store has said last; becomes ``manifest`` between leases
        self.entries: dict[int, list[m.Entry]] = {}  # by segment, of ``manifest``
        self.written: set[int] = set()  # segments that this lease has been allowed to write in place
        self.used: dict[int, None] = {}  # segments that this lease has brought to the interpreter, in that order
        self._bound: dict[int, int] = {}  # segment id by storage id: what the interpreter can reach

    def adopt(self) -> list[int]:
        """The newest manifest is the one from now on; returns the segments that it does not have any more."""
        before, self.manifest = self.entries, self.newest
        self.entries = {}
        for entry in self.manifest.entries:
            self.entries.setdefault(entry.segment, []).append(entry)
        current = {entry.storage: entry.segment for entry in self.manifest.entries}
        self._unbind(storage for storage, segment in list(self._bound.items()) if current.get(storage) != segment)
        return [segment for segment in before if segment not in self.entries]

    def bind_all(self, device: Device, residency: Residency, board: Board | None) -> None:
        """Bring the whole manifest within the interpreter's reach; first use of what is on its way waits for it."""
        for segment, entries in self.entries.items():
            coming = board if board is not None and board.arrival(segment) is not None else None
            if coming is None and all(self._bound.get(entry.storage) == segment for entry in entries):
                continue
            offset = residency.pool.offset(segment)
            for entry in entries:
                self._bind(device, residency, entry, offset + entry.offset, coming)

    def bind_none(self, failure: Failure) -> None:
        """The model cannot be here: whatever uses any of it fails with this."""

        def materialise() -> torch.UntypedStorage:
            raise CommandFailed(failure)

        self._unbind(list(self._bound))
        for entry in self.manifest.entries:
            self.interpreter.bind(entry.storage, entry.nbytes, materialise)

    def _bind(self, device: Device, residency: Residency, entry: m.Entry, offset: int, coming: Board | None) -> None:
        segment, arrival = entry.segment, coming.arrival(entry.segment) if coming is not None else None
        # A pack of which one storage is left is still not that storage.
        alone = len(self.entries[segment]) == 1 and entry.nbytes == residency.pool.nbytes(segment)

        def materialise() -> torch.UntypedStorage:
            self.used.setdefault(segment)
            if arrival is not None:
                arrival.wait(device)
            return device.storage(offset, entry.nbytes)

        def may_write(grows: bool) -> bool:
            if alone and not grows and residency.may_write(self.name, segment, self.owner):
                self.written.add(segment)
                return True
            self._bound.pop(entry.storage, None)  # from now on the storage is a copy that only this lease knows
            return False

        self._bound[entry.storage] = segment
        direct = partial(coming.direct, segment, entry.offset, entry.nbytes) if coming is not None else None
        self.interpreter.bind(entry.storage, entry.nbytes, materialise, may_write, direct)

    def segment_of(self, storage: int) -> int | None:
        """The segment in which a bound storage lies; None for one of its own."""
        return self._bound.get(storage)

    def unbind(self, storages: Iterable[int]) -> list[int]:
        """Take storages out of the interpreter's reach; returns those of their segments that the lease has written in
        place.
        """
        segments = self._unbind(storages)
        return [segment for segment in segments if segment in self.written]

    def _unbind(self, storages: Iterable[int]) -> list[int]:
        gone = list(storages)
        self.interpreter.unbind(gone)
        return [segment for storage in gone if (segment := self._bound.pop(storage, None)) is not None]

    def unbind_segments(self, segments: Iterable[int]) -> None:
        """These segments are not where they were."""
        self._unbind(
            [
                entry.storage
                for segment in segments
                for entry in self.entries.get(segment, ())
                if self._bound.get(entry.storage) == segment  # else it has become a copy that is still there
            ]
        )

    def close(self) -> None:
        """Unmap the arena. Explicitly: interpreters are cycles, and a copy that ended last may still know the lease."""
        self._unbind(list(self._bound))
        self.interpreter.close()
        self.arena.close()


@dataclass
class Ending:
    """An END that waits for the store."""

    request: EndRequest
    ticket: int
    storages: list[int]  # in the order of AskPlace
    freed: list[int]
    places: list[m.Place] | None = None  # set once the bytes are written; then the manifest is awaited


@dataclass
class Running:
    """The lease in progress."""

    wake: m.Wake
    tenant: Tenant
    began_s: float = field(default_factory=time.perf_counter)
    board: Board | None = None  # of a wake that copies something
    awake: bool = False  # nothing of the wake is under way any more
    copied_nbytes: int = 0
    busy_s: float = 0.0
    ending: Ending | None = None
    wrote: bool = False  # its END is to keep a change of what the model had before
    repaired_before: int = 0  # results whose layout was not the predicted one, of earlier leases

    @property
    def serial(self) -> int:
        return self.wake.lease.serial
