"""The bytes of one wake on their way: asks for each missing segment's source, starts the copies, tells who waits.

Two threads meet here. The device thread makes it, waits for arrivals, cancels and joins; the I/O thread delivers what
peers and the store answer. So the copies of a wake begin while the device thread already runs the request's first
commands. Sources are asked one after the other, nearest first: other GPUs, then the store.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from dormouse.gpuserver import transfer
from dormouse.gpuserver.device import CopyJob, Device, DeviceError, Event
from dormouse.gpuserver.storages import CommandFailed, Failure
from dormouse.gpuserver.transfer import Copy
from dormouse.schemas import messages as m

ISSUE_S: Final = 120.0
"""How long a command waits for a copy that has not begun: reading a large model from a slow disk is no error, a store
that does not answer is. The supervisor restarts it long before."""


ANSWER_S: Final = 0.1
"""How long the end of a lease waits for sources: more than they take from memory, less than a person would notice."""

PEER_SEGMENTS: Final = 1024
"""Segments that one peer is asked for: question and answer are one packet each. The rest comes from the next source."""


class Arrival:
    """A segment that is on its way."""

    def __init__(self) -> None:
        self._issued = threading.Event()  # or given up
        self._event: Event | None = None
        self._failure = ""

    def issue(self, event: Event) -> None:
        self._event = event
        self._issued.set()

    def issued_by(self, deadline_s: float) -> bool:
        """Wait until its copy was issued or given up, or until that time of the monotonic clock."""
        return self._issued.wait(max(0.0, deadline_s - time.monotonic()))

    def fail(self, text: str) -> None:
        if not self._issued.is_set():
            self._failure = text
            self._issued.set()

    def wait(self, device: Device) -> None:
        """Order the compute stream after its bytes; blocks the host only until the copy has been issued.

        Raises CommandFailed if it will not come.
        """
        if not self.issued_by(time.monotonic() + ISSUE_S):
            self._failure = f"no answer of the store in {ISSUE_S:g} s"
        if self._event is None:
            raise CommandFailed(Failure("RuntimeError", f"the model cannot be woken: {self._failure}", None))
        device.wait(self._event)

    @property
    def arrived(self) -> bool:
        return self._event is not None and self._event.done()


class Waking:
    """One wake that copies something.

    Args:
        after: point on the compute stream after which the pool's memory is as the plan of this wake made it.
        missing: ``(segment, offset in the pool, nbytes)`` in the order in which they are wanted.
        peers: GPUs to be asked, in this order, before the store.
        ask: sends PeerPin (with the GPU) or Fetch (with None); from either thread.
        let_go: says that nothing is read any more from a peer, or from the store (None); from any thread.
        on_arrived: called with each segment whose bytes are there, from any thread.
        on_done: called once from any thread when everything has arrived, and not if something never will.
    """

    def __init__(
        self,
        device: Device,
        ticket: int,
        after: Event,
        missing: Sequence[tuple[int, int, int]],
        peers: Sequence[int],
        ask: Callable[[int | None, list[int]], None],
        let_go: Callable[[int | None], None],
        on_arrived: Callable[[int], None],
        on_done: Callable[[], None],
    ) -> None:
        self.ticket = ticket
        self.peer_nbytes = 0
        self.file_nbytes = 0
        self.began_s = time.perf_counter()
        self._device, self._after = device, after
        self._arrivals = {segment: Arrival() for segment, _, _ in missing}
        self._wanted = {segment: (offset, nbytes) for segment, offset, nbytes in missing}  # not issued yet
        self._sizes = {segment: nbytes for segment, _, nbytes in missing}
        self._peers = list(peers)
        self._asked: int | None = None  # the peer whose answer is awaited
        self._ask, self._let_go = ask, let_go
        self._on_arrived, self._on_done = on_arrived, on_done
        self._lock = threading.RLock()
        self._jobs: list[CopyJob] = []
        self._reading: dict[int | None, int] = {}  # copies under way by source; the store is None
        self._answered: set[int | None] = set()  # sources that will say nothing more
        self._stopped = False  # nothing more is issued
        self._cancelled = False
        self._places: dict[int, m.Place] = {}  # where the store said that segments lie
        self._read_directly = False

    def start(self) -> None:
        """Ask the first source."""
        with self._lock:
            self._ask_next()

    def _ask_next(self) -> None:
        if self._stopped:
            return
        self._asked = self._peers.pop(0) if self._peers else None
        self._reading.setdefault(self._asked, 0)
        wanted = list(self._wanted)
        self._ask(self._asked, wanted if self._asked is None else wanted[:PEER_SEGMENTS])

    def arrival(self, segment: int) -> Arrival | None:
        """What to wait for before a segment is used; None if it was there."""
        return self._arrivals.get(segment)

    # --- answers, on the I/O thread

    def from_peer(self, gpu: int, extents: list[tuple[int, list[tuple[int, int]]]]) -> None:
        """What another GPU has, ``[(segment, [(offset, nbytes)])]``; the rest is asked of the next source."""
        with self._lock:
            if self._stopped or gpu != self._asked or gpu in self._answered:
                return
            self._answered.add(gpu)
            copies, owners = [], []
            for segment, spans in extents:
                target, nbytes = self._wanted.get(segment, (0, 0))
                if sum(length for _, length in spans) != nbytes or not nbytes:
                    continue
                for offset, length in spans:
                    copies.append(Copy(transfer.peer(gpu), offset, target, length))
                    owners.append(segment)
                    target += length
            try:
                self._copy(gpu, copies, owners)
                self.peer_nbytes += sum(copy.nbytes for copy in copies)
            except DeviceError:
                pass  # it cannot be reached from here: the host copy serves as well
            self._settle(gpu)
            if self._wanted:
                self._ask_next()

    def peer_lost(self, gpu: int) -> None:
        """It died before it answered. What is being read from its memory stays as it is."""
        self.from_peer(gpu, [])

    def from_store(self, fetched: m.Fetched) -> None:
        with self._lock:
            if self._stopped:
                return
            self.file_nbytes += fetched.file_nbytes
            copies, owners = [], []
            for place in fetched.places:
                target, nbytes = self._wanted.get(place.segment, (0, -1))
                if nbytes != place.nbytes:
                    continue
                copies.append(Copy(transfer.slab(place.slab), place.offset, target, nbytes))
                owners.append(place.segment)
                self._places[place.segment] = place
            try:
                self._copy(None, copies, owners)
            except DeviceError as error:
                self._fail(str(error))
            if fetched.last:
                self._answered.add(None)
                self._fail("the store does not have all of it")
                self._settle(None)

    def from_store_failed(self, text: str) -> None:
        with self._lock:
            if not self._stopped:
                self._answered.add(None)
                self._fail(text)
                self._settle(None)

    def _fail(self, text: str) -> None:
        for segment in self._wanted:
            self._arrivals[segment].fail(text)

    def _copy(self, source: int | None, copies: list[Copy], owners: list[int]) -> None:
        if not copies:
            return
        self._reading[source] += 1
        try:
            job = self._device.copy_in(copies, lambda: self._copied(source, owners), self._after)
        except BaseException:
            self._reading[source] -= 1
            raise
        self._jobs.append(job)
        last = dict(zip(owners, job.events, strict=True))  # of a segment that lies in several pieces
        for segment, event in last.items():
            del self._wanted[segment]
            self._arrivals[segment].issue(event)

    def _copied(self, source: int | None, owners: list[int]) -> None:
        """A job is done; on the copy stream's thread."""
        for segment in owners:
            self._on_arrived(segment)
        with self._lock:
            self._reading[source] -= 1
            self._settle(source)
            done = not self._cancelled and not self._wanted and not any(self._reading.values())
        if done:
            self._on_done()

    def _settle(self, source: int | None) -> None:
        """Let go of a source that has said all and from which nothing is copied any more."""
        if source in self._answered and self._reading.get(source) == 0 and not (source is None and self._read_directly):
            del self._reading[source]
            self._let_go(source)

    def direct(self, segment: int, offset: int, nbytes: int, touched_nbytes: int) -> torch.UntypedStorage | None:
        """Part of a segment that is on its way, where the store has it, for a command that needs ``touched_nbytes`` of
        it; None if it has come, or cannot be read there. It stays there until the lease ends. Device thread.
        """
        arrival = self._arrivals[segment]
        if not arrival.issued_by(time.monotonic() + ANSWER_S) or arrival.arrived:
            return None
        with self._lock:
            place = self._places.get(segment)
            if place is None or None not in self._reading:
                return None
            self._read_directly = True
        return self._device.host_storage(place.slab, place.offset + offset, nbytes, touched_nbytes)

    # --- the end, on the device thread

    def finish(self, cancel: bool) -> list[int]:
        """No copy is under way any more; returns the segments that did not arrive.

        Unless ``cancel``, what was issued is waited for, and a moment for sources that have not answered yet: a short
        request may be faster than they are. What is not issued by then never will be.
        """
        if not cancel:
            deadline_s = time.monotonic() + ANSWER_S
            for arrival in self._arrivals.values():
                arrival.issued_by(deadline_s)
        with self._lock:
            self._stopped, self._cancelled = True, cancel
            jobs = list(self._jobs)
            self._fail("the lease is over")
        for job in jobs:
            if cancel:
                job.cancel()
            job.join()
        if self._read_directly:
            self._device.synchronize()
        with self._lock:
            for source in list(self._reading):
                del self._reading[source]
                self._let_go(source)
        return [segment for segment, arrival in self._arrivals.items() if not arrival.arrived]

    def copied_nbytes(self, lost: Sequence[int]) -> int:
        return sum(self._sizes.values()) - sum(self._sizes[segment] for segment in lost)
