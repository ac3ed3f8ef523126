"""One instance on one GPU: its interpreter, the manifest it is bound to, and the lease it holds. Device thread only."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import torch

from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device import CopyJob, Device, Event
from dormouse.gpuserver.interpreter import EndRequest, Interpreter, InterpreterDevice
from dormouse.gpuserver.residency import Span
from dormouse.schemas import messages as m


class Tenant:
    """Keeps the interpreter's table in step with the manifest and with what is resident."""

    def __init__(self, attach: m.AttachInstance, arena: SharedMemory, device: InterpreterDevice) -> None:
        self.name: Final = attach.instance
        self.arena = arena
        layout = attach.arena
        self.interpreter = Interpreter(
            device, arena.view[layout.stream_offset : layout.stream_offset + layout.stream_nbytes]
        )
        self.manifest = m.Manifest(instance=attach.instance, version=0, segments=[])
        self.newest = self.manifest  # what the store has said last; becomes ``manifest`` between leases
        self._bound: dict[int, int] = {}  # segment id by storage id: what the interpreter can reach

    def bind(self, device: Device, segment: m.Segment, span: Span, event: Event | None) -> None:
        """Bring a resident (or arriving) segment within the interpreter's reach; first use waits for ``event``."""

        def materialise() -> torch.UntypedStorage:
            if event is not None:
                device.wait(event)
            return device.storage(span.offset, span.nbytes)

        self._bound[segment.storage] = segment.segment
        self.interpreter.bind(segment.storage, segment.nbytes, materialise)

    def is_bound(self, segment: m.Segment) -> bool:
        return self._bound.get(segment.storage) == segment.segment

    def rebound(self, storage: int, segment: int) -> None:
        """The storage's bytes are now those of another segment, in the same place."""
        self._bound[storage] = segment

    def unbind(self, storages: Iterable[int]) -> list[int]:
        """Take storages out of the interpreter's reach; returns the segments that they were bound to."""
        gone = list(storages)
        self.interpreter.unbind(gone)
        return [segment for storage in gone if (segment := self._bound.pop(storage, None)) is not None]

    def unbind_all(self) -> None:
        self.unbind(list(self._bound))

    def unbind_stale(self) -> list[int]:
        """Unbind what the manifest does not say any more; returns those segments."""
        current = {segment.storage: segment.segment for segment in self.manifest.segments}
        return self.unbind([storage for storage, segment in self._bound.items() if current.get(storage) != segment])

    def close(self) -> None:
        self.unbind_all()
        self.arena.close()


@dataclass
class Ending:
    """An END that waits for the store."""

    request: EndRequest
    ticket: int
    created: set[int]
    freed: list[int]
    placed: list[m.Segment] | None = None  # set once the bytes are written; then the manifest is awaited


@dataclass
class Running:
    """The lease in progress."""

    wake: m.Wake
    tenant: Tenant
    began_s: float
    job: CopyJob | None = None
    arriving: list[m.Segment] = field(default_factory=list)  # what the job copies, in its order
    evicted: list[str] = field(default_factory=list)
    copied_nbytes: int = 0
    busy_s: float = 0.0
    ending: Ending | None = None

    @property
    def serial(self) -> int:
        return self.wake.lease.serial
