"""Decides how the missing bytes of one wake come: the sources, the copies, and when it has failed or is done.

Pure: each method is an event and returns effects, which are carried out in order before the next event. Sources are
asked one after the other, nearest first: other GPUs, then the store, in batches. A segment is::

    wanted -> (CopyIn, began)   -> coming -> (copied) -> there
           <- (refused by a peer)
           -> (GiveUp)          -> lost: no source has it, or the lease is over
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from dormouse.core.decisions.memory import transfer
from dormouse.core.decisions.memory.transfer import Copy
from dormouse.schemas import messages as m

BATCHES: Final = 2
"""Questions to the store that are open at a time: while one batch is copied, the next may be read from its files."""

JOB_NBYTES: Final = 8 << 20
"""Bytes copied before their arrival is reported, if that is less than a part in ``MAX_JOBS`` of all: a runtime computes
a layer while the next one is on its way.
"""

MAX_JOBS: Final = 256

PEER_SEGMENTS: Final = 1024
"""Segments that one peer is asked for: question and answer are one packet each. The rest comes from the next source."""


class Shown:
    """The store's places of segments: the compute thread may hold on to them, and the executor's thread may let them
    go; the first of the two wins. Each sets its own flag before it looks at the other's, so they may both refrain, but
    never both act.
    """

    __slots__ = ("_held", "_kept", "_let_go")

    def __init__(self) -> None:
        self._held = self._kept = self._let_go = False

    def hold(self) -> bool:
        """Compute thread: from now on it stays until the wake is over; False if it may be gone."""
        if not self._held:
            self._held = True
            self._kept = not self._let_go
        return self._kept

    def let_go(self) -> bool:
        """Executor's thread: no thread may hold it from now on; False if one does."""
        self._let_go = True
        return not self._held


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask another GPU for its part of these segments (PeerPin), or the store for places (``gpu`` None: Fetch)."""

    gpu: int | None
    ticket: int
    segments: list[int]


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Begin these copies; ``owners`` are their segments. Answered with `began` or `refused`, later with `copied`."""

    number: int
    copies: list[Copy]
    owners: list[int]


@dataclass(frozen=True, slots=True)
class LetGoOfSource:
    """Nothing of a ticket's answer is read any more."""

    gpu: int | None
    ticket: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """These segments will not come: every lease that waits for one is notified."""

    segments: list[int]
    text: str
    damaged: bool


@dataclass(frozen=True, slots=True)
class AllHere:
    """Everything has arrived; at most once."""


Effect = Ask | CopyIn | LetGoOfSource | GiveUp | AllHere


@dataclass(slots=True)
class _Asked:
    """One question that is open: to a peer, or to the store (``gpu`` None)."""

    gpu: int | None
    segments: list[int]
    shown: Shown
    answered: bool = False  # it will send nothing more
    ordered: int = 0  # jobs that have neither begun nor been refused
    reading: int = 0  # jobs from it that are under way

    @property
    def open(self) -> bool:
        """Whether it still has something to send, or is being copied from."""
        return not self.answered or self.reading > 0


@dataclass(slots=True)
class _Job:
    """Copies that were ordered: their segments are not wanted any more, unless they are refused."""

    ticket: int
    segments: dict[int, tuple[int, int]]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of the bytes of a wake so far."""

    peer_nbytes: int = 0
    file_nbytes: int = 0
    gave: list[int] = field(default_factory=list)  # the GPUs that the bytes from peers come from

    def farthest(self, nbytes: int) -> m.WokenFrom:
        """Of so many bytes in all."""
        return "disk" if self.file_nbytes else "host" if self.peer_nbytes < nbytes else "peer"


class WakeCopies:
    """One wake that copies something.

    Args:
        missing: ``(segment, offset in the pool, nbytes)`` in the order in which they are wanted.
        peers: GPUs to be asked, in this order, before the store.
        batch_nbytes: about how much is asked of the store at once, twice: so much of its memory stays where it is.
        tickets: numbers for questions.
    """

    def __init__(
        self,
        missing: Sequence[tuple[int, int, int]],
        peers: Sequence[int],
        batch_nbytes: int,
        tickets: Iterator[int],
    ) -> None:
        self.places: dict[int, tuple[Shown, m.Place]] = {}  # by segment that the store has shown
        self._sizes = {segment: nbytes for segment, _, nbytes in missing}
        self._wanted = {segment: (offset, nbytes) for segment, offset, nbytes in missing}
        self._unasked: deque[int] = deque()  # of those: the store has not been asked yet
        self._peers = list(peers)
        self._batch_nbytes = batch_nbytes
        self._job_nbytes = max(JOB_NBYTES, sum(self._sizes.values()) // MAX_JOBS)
        self._tickets = tickets
        self._asked: dict[int, _Asked] = {}  # by ticket
        self._jobs: dict[int, _Job] = {}  # by number: ordered, and not done
        self._job_numbers = 0
        self._peer_nbytes = self._file_nbytes = 0
        self._gave: list[int] = []
        self._stopped = self._cancelled = False  # nothing more is ordered; nor is the end reported
        self._failed = False  # something will not come

    @property
    def sources(self) -> Sources:
        return Sources(self._peer_nbytes, self._file_nbytes, list(self._gave))

    @property
    def settled(self) -> bool:
        """Nothing more will come."""
        return not self._wanted and not self._jobs

    # --- events

    def begin(self) -> list[Effect]:
        return self._ask_next()

    def peer_answered(self, ticket: int, extents: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> list[Effect]:
        """Another GPU has these bytes, ``[(segment, [(offset, nbytes)])]``; the rest is asked of the next source."""
        asked = self._asked.get(ticket)
        if self._stopped or asked is None or asked.gpu is None or asked.answered:
            return []
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
        return self._order(ticket, copies, owners) or self._go_on(ticket)

    def peer_lost(self, gpu: int) -> list[Effect]:
        """A peer died before it answered. Bytes that are being read from its memory stay there."""
        tickets = [ticket for ticket, asked in self._asked.items() if asked.gpu == gpu]
        return [effect for ticket in tickets for effect in self.peer_answered(ticket, [])]

    def fetched(self, fetched: m.Fetched) -> list[Effect]:
        """The store's answer, or a part of it."""
        asked = self._asked.get(fetched.ticket)
        if self._stopped or asked is None:
            return []
        self._file_nbytes += fetched.file_nbytes
        copies, owners = [], []
        for place in fetched.places:
            target, nbytes = self._wanted.get(place.segment, (0, -1))
            if nbytes == place.nbytes:
                copies.append(Copy(transfer.slab(place.slab), place.offset, target, nbytes))
                owners.append(place.segment)
                self.places[place.segment] = asked.shown, place
        effects = self._order(fetched.ticket, copies, owners)
        if fetched.last:
            asked.answered = True
            if any(segment in self._wanted for segment in asked.segments):
                effects += self._fail("the store does not have all of it")
            effects += self._settle(fetched.ticket)
        return effects

    def fetch_failed(self, ticket: int, text: str, damaged: bool) -> list[Effect]:
        asked = self._asked.get(ticket)
        if self._stopped or asked is None:
            return []
        asked.answered = True
        return [*self._fail(text, damaged), *self._settle(ticket)]

    def began(self, number: int) -> list[Effect]:
        """The copies are on their way."""
        job = self._jobs[number]
        asked = self._asked[job.ticket]
        asked.ordered -= 1
        if asked.gpu is None:
            return []
        self._peer_nbytes += job.nbytes
        if asked.gpu not in self._gave:
            self._gave.append(asked.gpu)
        return self._go_on(job.ticket)

    def refused(self, number: int, text: str) -> list[Effect]:
        """None of the copies is made. A peer's memory cannot be reached: the host's copy serves as well."""
        job = self._jobs.pop(number)
        asked = self._asked[job.ticket]
        asked.ordered -= 1
        asked.reading -= 1
        self._wanted = job.segments | self._wanted
        if asked.gpu is not None:
            return self._go_on(job.ticket)
        return [*self._fail(text), *self._settle(job.ticket)]

    def copied(self, number: int) -> list[Effect]:
        """The bytes are there."""
        job = self._jobs.pop(number)
        if job.ticket not in self._asked:
            return []  # the wake is over
        self._asked[job.ticket].reading -= 1
        effects = self._settle(job.ticket)
        if not (self._cancelled or self._failed or self._wanted or self._jobs):
            effects.append(AllHere())
        return effects

    def stop(self, cancel: bool) -> list[Effect]:
        """Order nothing more; segments not ordered yet will not come. ``cancel``: nor are they needed."""
        self._stopped = True
        self._cancelled = self._cancelled or cancel
        return self._fail("the lease is over")

    def over(self) -> list[Effect]:
        """No copy is under way, and nothing is read any more."""
        effects: list[Effect] = [LetGoOfSource(asked.gpu, ticket) for ticket, asked in self._asked.items()]
        self._asked.clear()
        return effects

    # --- parts

    def _ask_next(self) -> list[Effect]:
        """The next peer; after the last one, the store."""
        if self._peers:
            return [self._ask(self._peers.pop(0), list(self._wanted)[:PEER_SEGMENTS])]
        self._unasked.extend(self._wanted)
        return self._ask_store()

    def _ask_store(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._unasked and not self._stopped and sum(asked.open for asked in self._asked.values()) < BATCHES:
            batch, nbytes = [self._unasked[0]], self._sizes[self._unasked.popleft()]
            while self._unasked and nbytes + self._sizes[self._unasked[0]] <= self._batch_nbytes:
                nbytes += self._sizes[self._unasked[0]]
                batch.append(self._unasked.popleft())
            effects.append(self._ask(None, batch))
        return effects

    def _ask(self, gpu: int | None, segments: list[int]) -> Ask:
        ticket = next(self._tickets)
        self._asked[ticket] = _Asked(gpu, segments, Shown())
        return Ask(gpu, ticket, segments)

    def _order(self, ticket: int, copies: list[Copy], owners: list[int]) -> list[Effect]:
        """In jobs of about equal bytes; all of a segment is in one."""
        effects: list[Effect] = []
        start, nbytes = 0, 0
        for end, copy in enumerate(copies, 1):
            nbytes += copy.nbytes
            if end == len(copies) or (nbytes >= self._job_nbytes and owners[end] != owners[end - 1]):
                effects.append(self._job(ticket, copies[start:end], owners[start:end], nbytes))
                start, nbytes = end, 0
        return effects

    def _job(self, ticket: int, copies: list[Copy], owners: list[int], nbytes: int) -> CopyIn:
        self._job_numbers += 1
        segments = {segment: self._wanted.pop(segment) for segment in dict.fromkeys(owners)}
        self._jobs[self._job_numbers] = _Job(ticket, segments, nbytes)
        self._asked[ticket].ordered += 1
        self._asked[ticket].reading += 1
        return CopyIn(self._job_numbers, copies, owners)

    def _go_on(self, ticket: int) -> list[Effect]:
        """A peer has given all that it had: the rest is asked of the next source."""
        if self._asked[ticket].ordered:
            return []
        effects = self._settle(ticket)
        return [*effects, *self._ask_next()] if self._wanted else effects

    def _fail(self, text: str, damaged: bool = False) -> list[Effect]:
        """Segments that have not been ordered will not come."""
        self._unasked.clear()
        if not self._wanted:
            return []
        self._failed = True
        given_up, self._wanted = list(self._wanted), {}
        return [GiveUp(given_up, text, damaged)]

    def _settle(self, ticket: int) -> list[Effect]:
        """Lets go of answers that are no longer read, and asks for more."""
        asked = self._asked[ticket]
        if asked.open:
            return []
        effects: list[Effect] = []
        if asked.shown.let_go():
            del self._asked[ticket]
            effects.append(LetGoOfSource(asked.gpu, ticket))
        return effects + self._ask_store()
