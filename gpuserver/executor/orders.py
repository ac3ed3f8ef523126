"""Orders of the compute thread, in order. Filled by the executor's thread."""

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue

from msgspec import Struct

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.gate import FrameHeader
from dormouse.core.links.loan import Loan
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.executor.wakes import BeginWake, StopWake, WakeOver
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire


class Attach(Struct, frozen=True, gc=False):
    """A new instance, and its memory."""

    attach: m.AttachInstance
    arena: SharedMemory


class Serve(Struct, frozen=True, gc=False):
    """The frames that follow the one with this header, which is ``given``, on the instance's connection, until there is
    anything else to do; None: it had none, and the first is waited for until ``until_s``.
    """

    serial: int
    header: FrameHeader
    loan: Loan
    given: bytes | None
    until_s: float = 0.0


class Repaid(Struct, frozen=True, gc=False):
    """The compute thread uses the connection no more."""

    loan: Loan


Item = o.Order | Attach | Serve | o.ComputeAnswer | None
Posted = e.Event | Repaid | BeginWake | StopWake | WakeOver


class Orders:
    """The orders of the compute thread, in order; the executor's thread gives them.

    While the compute thread waits for an answer, it is given only orders that make room, because these may be carried
    out in the middle of a command. A plan of the pool is carried out as soon as any order is looked at, before all
    older orders: no command can tell, because the contents of seats stay where they are.
    """

    def __init__(self) -> None:
        self.skipped: set[int] = set()  # leases whose frames are not to be begun any more
        self.plans: deque[o.Arrange] = deque()
        self.items: SimpleQueue[Item] = SimpleQueue()
        self.urgent: SimpleQueue[Item] = SimpleQueue()
        self._asked = False  # it waits for an answer
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sleeps = False  # it waits for frames or orders, and wakes at the bell
        self._quiet_until_s: float | None = None  # it need not look at its orders before
        self._poll = select.epoll()
        self._poll.register(self._bell, select.EPOLLIN)
        self._leaving: set[int] = set()  # leases whose seat is to be left, or has been

    def close(self) -> None:
        self._poll.close()
        os.close(self._bell)

    def heard(self, event: Posted) -> None:
        """Before the event is handled."""
        if isinstance(event, e.MayWrite | e.Relieve):
            self._asked = True

    def give(self, order: Item) -> None:
        if isinstance(order, o.Arrange):
            self.plans.append(order)
        if isinstance(order, o.ComputeAnswer):
            self._asked = False
            self.urgent.put(order)
        elif self._asked and self._makes_room(order):
            self.urgent.put(order)
        else:
            self.items.put(order)
            self._quiet_until_s = None
            if self._sleeps:
                os.eventfd_write(self._bell, 1)
        if isinstance(order, o.Own):
            self._leaving.add(order.serial)
        elif isinstance(order, o.Close):
            self._leaving.discard(order.serial)
        elif isinstance(order, o.Return):
            self._leaving.discard(order.begin.serial)

    def listen(self, begin: o.Begin, loan: Loan, until_s: float) -> None:
        """Two orders that wait until there is something to receive, another order, or this time."""
        self._poll.register(loan.fileno(), select.EPOLLIN)  # first: the compute thread may be at it at once
        self._quiet_until_s = until_s if self.items.empty() else None
        self.items.put(begin)
        self.items.put(Serve(begin.serial, FrameHeader(begin.serial, begin.secret, 0), loan, None, until_s))

    def next_item(self) -> Item:
        """Wait for the next order."""
        while self.idle:
            until_s = self._quiet_until_s
            self._wait(None if until_s is None else max(0.0, until_s - time.monotonic()))
        return self.items.get()

    @property
    def rests(self) -> bool:
        """The same, and no frame has come where one is awaited."""
        return self.idle and not self._poll.poll(0)

    @property
    def idle(self) -> bool:
        """Whether there is nothing that cannot wait."""
        return self._quiet_until_s is not None or self.items.empty()

    @contextlib.contextmanager
    def hearing(self, loan: Loan) -> Iterator[None]:
        """`next_frame` waits for it."""
        with contextlib.suppress(FileExistsError):  # see `listen`
            self._poll.register(loan.fileno(), select.EPOLLIN)
        try:
            yield
        finally:
            self._poll.unregister(loan.fileno())

    def next_frame(self, loan: Loan, timeout_s: float) -> bytes | None:
        """The next message on this connection, for the compute thread; None as soon as there is an order to carry out,
        the connection is to be given back, so many wait that the gate has to look, or for ``timeout_s`` seconds none.
        """
        while self.items.empty() and not loan.over and len(loan.heard) < wire.WINDOW_FRAMES:
            if loan.heard:
                return loan.heard.popleft()
            if not (ready := self._wait(timeout_s)):
                break
            if loan.fileno() in ready:
                loan.read()
        return None

    def pressing(self, loan: Loan) -> bool:
        """Whether `next_frame` would return at once."""
        if self.items.empty() and not loan.over and not loan.heard:
            loan.read()
        return not self.items.empty() or loan.over or bool(loan.heard)

    def _wait(self, timeout_s: float | None) -> list[int]:
        """Until something can be read, or is given, on the bell; none if time is up."""
        self._sleeps = True
        try:
            ready = [fd for fd, _ in self._poll.poll(timeout_s)] if self.idle else [self._bell]
        finally:
            self._sleeps = False
        self._quiet_until_s = None
        if self._bell in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        return ready

    def _makes_room(self, order: Item) -> bool:
        match order:
            case o.Arrange() | o.Own():
                return True
            case o.CopyOut(spill=spill):
                return spill
            case o.Close(serial=serial):
                return serial in self._leaving
            case _:
                return False
