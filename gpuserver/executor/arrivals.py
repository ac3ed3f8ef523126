"""Events for which the compute thread waits while a model comes: each segment's bytes, and the end of the wake.

The executor's thread fills the board, the compute thread waits at it. Each event happens once, so no lock is needed: it
is set after the change that it announces.
"""

import threading
import time
from collections.abc import Iterable
from typing import Final

import torch

from dormouse.core.decisions.leases.wake import Shown, Sources
from dormouse.gpuserver.commands.storages import CommandFailed, StorageFailure
from dormouse.gpuserver.device.protocol import CopyJob, Device, DeviceEvent
from dormouse.schemas import messages as m

ISSUE_S: Final = 120.0
"""How long a command waits for a copy that has not begun: reading a large model from a slow disk is no error, a store
that does not answer is. The supervisor restarts it long before.
"""

ANSWER_S: Final = 0.1
"""How long the end of a lease waits for sources: more than they take from memory, less than a person would notice."""


class Arrival:
    """A segment that is on its way."""

    def __init__(self) -> None:
        self._issued = threading.Event()  # or given up
        self._event: DeviceEvent | None = None
        self._failure = ""
        self._damaged = False
        self.place: tuple[Shown, m.Place] | None = None  # where the store has it

    def issue(self, event: DeviceEvent, place: tuple[Shown, m.Place] | None = None) -> None:
        self._event, self.place = event, place
        self._issued.set()

    def fail(self, text: str, damaged: bool) -> None:
        if not self._issued.is_set():
            self._failure, self._damaged = text, damaged
            self._issued.set()

    def issued_by(self, deadline_s: float) -> bool:
        """Wait until its copy was issued or given up, or until that time of the monotonic clock."""
        return self._issued.wait(max(0.0, deadline_s - time.monotonic()))

    def wait(self, device: Device) -> None:
        """Order the compute stream after its bytes; blocks the host only until the copy has been issued.

        Raises CommandFailed if it will not come.
        """
        if not self.issued_by(time.monotonic() + ISSUE_S):
            self._failure = f"no answer of the store in {ISSUE_S:g} s"
        if self._event is None:
            kind = "ModelDamaged" if self._damaged else "WakeFailed"
            raise CommandFailed(StorageFailure(kind, f"the model cannot be woken: {self._failure}"))
        device.wait(self._event)

    @property
    def failed(self) -> bool:
        return bool(self._failure)

    @property
    def arrived(self) -> bool:
        return self._event is not None and self._event.done()


class Board:
    """The arrivals of one wake."""

    def __init__(self, device: Device, segments: Iterable[int]) -> None:
        self.sources = Sources()  # of the whole wake, once it is stopped
        self._stopped = threading.Event()  # no job is added any more
        self._jobs: list[CopyJob] = []
        self._device = device
        self._arrivals = {segment: Arrival() for segment in segments}
        self._held = False

    def arrival(self, segment: int) -> Arrival | None:
        """The arrival to await before a segment is used; None if the segment was there."""
        return self._arrivals.get(segment)

    def failed(self, segment: int) -> bool:
        """Whether it will not come."""
        arrival = self._arrivals.get(segment)
        return arrival is not None and arrival.failed

    # --- the executor's thread

    def issue(self, job: CopyJob, owners: list[int], places: dict[int, tuple[Shown, m.Place]]) -> None:
        """A segment that lies in several pieces is there with the last."""
        self._jobs.append(job)
        for segment, event in dict(zip(owners, job.events, strict=True)).items():
            self._arrivals[segment].issue(event, places.get(segment))

    def give_up(self, segments: Iterable[int], text: str, damaged: bool) -> None:
        for segment in segments:
            self._arrivals[segment].fail(text, damaged)

    def stop(self, sources: Sources) -> None:
        self.sources = sources
        self._stopped.set()

    # --- the compute thread

    def direct(self, segment: int, offset: int, nbytes: int, touched_nbytes: int) -> torch.UntypedStorage | None:
        """Part of a segment that is on its way, where the store has it, for a command that needs ``touched_nbytes`` of
        it; None if it has come, or cannot be read there. It stays there until the lease ends.
        """
        arrival = self._arrivals[segment]
        if not arrival.issued_by(time.monotonic() + ANSWER_S) or arrival.arrived or arrival.place is None:
            return None
        shown, place = arrival.place
        if not shown.hold():
            return None
        self._held = True
        return self._device.host_storage(place.slab, place.offset + offset, nbytes, touched_nbytes)

    def await_sources(self) -> None:
        """A moment for sources that have not answered yet: a short request may be faster than they are."""
        deadline_s = time.monotonic() + ANSWER_S
        for arrival in self._arrivals.values():
            arrival.issued_by(deadline_s)

    def join(self, cancel: bool) -> tuple[list[int], list[int]]:
        """Once the wake is stopped: no copy is under way any more; the segments that have arrived, and those that have
        not.
        """
        self._stopped.wait()
        for job in self._jobs:
            if cancel:
                job.cancel()
            job.join()
        if self._held:
            self._device.synchronize()
        there: list[int] = []
        lost: list[int] = []
        for segment, arrival in self._arrivals.items():
            (there if arrival.arrived else lost).append(segment)
        return there, lost
