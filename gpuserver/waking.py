"""The bytes of one wake on their way: asks for each missing segment's source, starts the copies, tells who waits.

Two threads meet here. The device thread makes it, waits for arrivals, cancels and joins; the I/O thread delivers what
peers and the store answer. So the copies of a wake begin while the device thread already runs the request's first
commands. Sources are asked one after the other, nearest first: other GPUs, then the store.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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

BATCHES: Final = 2
"""Questions to the store that are open at a time: while one batch is copied, the next may be read from its files."""

PEER_SEGMENTS: Final = 1024
"""Segments that one peer is asked for: question and answer are one packet each. The rest comes from the next source."""


class Arrival:
    """A segment that is on its way."""

    def __init__(self) -> None:
        self._issued = threading.Event()  # or given up
        self._event: Event | None = None
        self._failure = ""
        self._damaged = False

    def issue(self, event: Event) -> None:
        self._event = event
        self._issued.set()

    def issued_by(self, deadline_s: float) -> bool:
        """Wait until its copy was issued or given up, or until that time of the monotonic clock."""
        return self._issued.wait(max(0.0, deadline_s - time.monotonic()))

    def fail(self, text: str, damaged: bool) -> None:
        if not self._issued.is_set():
            self._failure, self._damaged = text, damaged
            self._issued.set()

    def wait(self, device: Device) -> None:
        """Order the compute stream after its bytes; blocks the host only until the copy has been issued.

        Raises CommandFailed if it will not come.
        """
        if not self.issued_by(time.monotonic() + ISSUE_S):
            self._failure = f"no answer of the store in {ISSUE_S:g} s"
        if self._event is None:
            kind = "ModelDamaged" if self._damaged else "WakeFailed"
            raise CommandFailed(Failure(kind, f"the model cannot be woken: {self._failure}", None))
        device.wait(self._event)

    @property
    def arrived(self) -> bool:
        return self._event is not None and self._event.done()


class _Asked:
    """One question that is open: to a peer, or to the store (``gpu`` None)."""

    __slots__ = ("answered", "gpu", "held", "reading", "segments")

    def __init__(self, gpu: int | None, segments: list[int]) -> None:
        self.gpu = gpu
        self.segments = segments
        self.answered = False  # it will say nothing more
        self.reading = 0  # copies from it that are under way
        self.held = False  # read from directly: kept until the lease ends

    @property
    def open(self) -> bool:
        """Whether it still has something to say, or is being copied from."""
        return not self.answered or self.reading > 0


class Waking:
    """One wake that copies something.

    Args:
        after: point on the compute stream after which the pool's memory is as the plan of this wake made it.
        missing: ``(segment, offset in the pool, nbytes)`` in the order in which they are wanted.
        peers: GPUs to be asked, in this order, before the store.
        batch_nbytes: about how much is asked of the store at once, twice: so much of its memory stays where it is.
        tickets: numbers for questions.
        ask: sends PeerPin (with the GPU) or Fetch (with None) for a ticket; from any thread.
        let_go: says that nothing of a ticket is read any more (with the GPU or None); from any thread.
        on_arrived: called with each segment whose bytes are there, from any thread.
        on_done: called once from any thread when everything has arrived, and not if something never will.
    """

    def __init__(
        self,
        device: Device,
        after: Event,
        missing: Sequence[tuple[int, int, int]],
        peers: Sequence[int],
        batch_nbytes: int,
        tickets: Iterator[int],
        ask: Callable[[int | None, int, list[int]], None],
        let_go: Callable[[int | None, int], None],
        on_arrived: Callable[[int], None],
        on_done: Callable[[], None],
    ) -> None:
        self.peer_nbytes = 0
        self.file_nbytes = 0
        self.gave: list[int] = []  # the GPUs that the bytes from peers come from
        self._device, self._after = device, after
        self._batch_nbytes = batch_nbytes
        self._arrivals = {segment: Arrival() for segment, _, _ in missing}
        self._sizes = {segment: nbytes for segment, _, nbytes in missing}
        self._wanted = {segment: (offset, nbytes) for segment, offset, nbytes in missing}  # not issued yet
        self._unasked: deque[int] = deque()  # of those: the store has not been asked yet
        self._peers = list(peers)
        self._tickets, self._send, self._let_go = tickets, ask, let_go
        self._on_arrived, self._on_done = on_arrived, on_done
        self._lock = threading.RLock()
        self._jobs: list[CopyJob] = []
        self._asked: dict[int, _Asked] = {}  # by ticket
        self._places: dict[int, tuple[int, m.Place]] = {}  # ticket and place, by segment that the store has shown
        self._stopped = False  # nothing more is issued
        self._cancelled = False
        self._failed = False

    def start(self) -> None:
        """Ask the first source."""
        with self._lock:
            self._ask_next()

    def _ask_next(self) -> None:
        """The next peer; after the last one, the store."""
        if self._peers:
            self._ask(self._peers.pop(0), list(self._wanted)[:PEER_SEGMENTS])
        else:
            self._unasked.extend(self._wanted)
            self._ask_store()

    def _ask_store(self) -> None:
        while self._unasked and not self._stopped and sum(asked.open for asked in self._asked.values()) < BATCHES:
            batch, nbytes = [self._unasked[0]], self._sizes[self._unasked.popleft()]
            while self._unasked and nbytes + self._sizes[self._unasked[0]] <= self._batch_nbytes:
                nbytes += self._sizes[self._unasked[0]]
                batch.append(self._unasked.popleft())
            self._ask(None, batch)

    def _ask(self, gpu: int | None, segments: list[int]) -> None:
        ticket = next(self._tickets)
        self._asked[ticket] = _Asked(gpu, segments)
        self._send(gpu, ticket, segments)

    def arrival(self, segment: int) -> Arrival | None:
        """What to wait for before a segment is used; None if it was there."""
        return self._arrivals.get(segment)

    # --- answers, on the I/O thread

    def from_peer(self, ticket: int, extents: list[tuple[int, list[tuple[int, int]]]]) -> None:
        """What another GPU has, ``[(segment, [(offset, nbytes)])]``; the rest is asked of the next source."""
        with self._lock:
            asked = self._asked.get(ticket)
            if self._stopped or asked is None or asked.gpu is None or asked.answered:
                return
            asked.answered = True
            copies, owners = [], []
            for segment, spans in extents:
                target, nbytes = self._wanted.get(segment, (0, 0))
                if sum(length for _, length in spans) != nbytes or not nbytes:
                    continue
                for offset, length in spans:
                    copies.append(Copy(transfer.peer(asked.gpu), offset, target, length))
                    owners.append(segment)
                    target += length
            try:
                self._copy(ticket, copies, owners)
                self.peer_nbytes += sum(copy.nbytes for copy in copies)
                if copies:
                    self.gave.append(asked.gpu)
            except DeviceError:
                pass  # it cannot be reached from here: the host copy serves as well
            self._settle(ticket)
            if self._wanted:
                self._ask_next()

    def from_nobody(self, ticket: int) -> None:
        """A peer does not answer."""
        self.from_peer(ticket, [])

    def peer_lost(self, gpu: int) -> None:
        """It died before it answered. What is being read from its memory stays as it is."""
        with self._lock:
            for ticket in [ticket for ticket, asked in self._asked.items() if asked.gpu == gpu]:
                self.from_peer(ticket, [])

    def from_store(self, fetched: m.Fetched) -> None:
        with self._lock:
            asked = self._asked.get(fetched.ticket)
            if self._stopped or asked is None:
                return
            self.file_nbytes += fetched.file_nbytes
            copies, owners = [], []
            for place in fetched.places:
                target, nbytes = self._wanted.get(place.segment, (0, -1))
                if nbytes != place.nbytes:
                    continue
                copies.append(Copy(transfer.slab(place.slab), place.offset, target, nbytes))
                owners.append(place.segment)
                self._places[place.segment] = fetched.ticket, place
            try:
                self._copy(fetched.ticket, copies, owners)
            except DeviceError as error:
                self._fail(str(error))
            if fetched.last:
                asked.answered = True
                if any(segment in self._wanted for segment in asked.segments):
                    self._fail("the store does not have all of it")
                self._settle(fetched.ticket)

    def from_store_failed(self, ticket: int, text: str, damaged: bool) -> None:
        with self._lock:
            asked = self._asked.get(ticket)
            if not self._stopped and asked is not None:
                asked.answered = True
                self._fail(text, damaged)
                self._settle(ticket)

    def _fail(self, text: str, damaged: bool = False) -> None:
        """What has not been issued will not come."""
        self._unasked.clear()
        self._failed = self._failed or bool(self._wanted)
        for segment in self._wanted:
            self._arrivals[segment].fail(text, damaged)
        self._wanted.clear()

    def _copy(self, ticket: int, copies: list[Copy], owners: list[int]) -> None:
        if not copies:
            return
        self._asked[ticket].reading += 1
        try:
            job = self._device.copy_in(copies, lambda: self._copied(ticket, owners), self._after)
        except BaseException:
            self._asked[ticket].reading -= 1
            raise
        self._jobs.append(job)
        last = dict(zip(owners, job.events, strict=True))  # of a segment that lies in several pieces
        for segment, event in last.items():
            del self._wanted[segment]
            self._arrivals[segment].issue(event)

    def _copied(self, ticket: int, owners: list[int]) -> None:
        """A job is done; on the copy stream's thread."""
        for segment in owners:
            self._on_arrived(segment)
        with self._lock:
            self._asked[ticket].reading -= 1
            self._settle(ticket)
            reading = any(asked.reading for asked in self._asked.values())
            done = not self._cancelled and not self._failed and not self._wanted and not reading
        if done:
            self._on_done()

    def _settle(self, ticket: int) -> None:
        """Let go of what has been answered and is not read any more, and ask for more."""
        asked = self._asked[ticket]
        if asked.open:
            return
        if not asked.held:
            del self._asked[ticket]
            self._let_go(asked.gpu, ticket)
        self._ask_store()

    def direct(self, segment: int, offset: int, nbytes: int, touched_nbytes: int) -> torch.UntypedStorage | None:
        """Part of a segment that is on its way, where the store has it, for a command that needs ``touched_nbytes`` of
        it; None if it has come, or cannot be read there. It stays there until the lease ends. Device thread.
        """
        arrival = self._arrivals[segment]
        if not arrival.issued_by(time.monotonic() + ANSWER_S) or arrival.arrived:
            return None
        with self._lock:
            ticket, place = self._places.get(segment, (0, None))
            asked = self._asked.get(ticket)
            if place is None or asked is None:
                return None
            asked.held = True
        return self._device.host_storage(place.slab, place.offset + offset, nbytes, touched_nbytes)

    def interrupt(self) -> None:
        """The lease is over, and the device thread may be waiting for something here. Any thread."""
        with self._lock:
            self._stopped = self._cancelled = True
            self._fail("the lease is over")

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
            held = any(asked.held for asked in self._asked.values())
        for job in jobs:
            if cancel:
                job.cancel()
            job.join()
        if held:
            self._device.synchronize()
        with self._lock:
            for ticket, asked in self._asked.items():
                self._let_go(asked.gpu, ticket)
            self._asked.clear()
        lost = []
        for segment, arrival in self._arrivals.items():
            if arrival.arrived:
                self._on_arrived(segment)  # a job that was cancelled does not say so
            else:
                lost.append(segment)
        return lost

    def copied_nbytes(self, lost: Sequence[int]) -> int:
        return sum(self._sizes.values()) - sum(self._sizes[segment] for segment in lost)
