"""What the compute thread has been given to do, in order. Filled by the executor's thread."""

import contextlib
import os
import select
from collections import deque
from queue import SimpleQueue

from msgspec import Struct

from dormouse.core.links.loan import Loan
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.executor.wakes import BeginWake, StopWake, WakeOver
from dormouse.gpuserver.lease import effects as o
from dormouse.gpuserver.lease import events as e
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire


class Attach(Struct, frozen=True, gc=False):
    """A new instance, and its memory."""

    attach: m.AttachInstance
    arena: SharedMemory


class Serve(Struct, frozen=True, gc=False):
    """A frame, and those that follow it on the instance's connection, until there is anything else to do."""

    execute: o.Execute
    loan: Loan


class Repaid(Struct, frozen=True, gc=False):
    """The compute thread uses the connection no more."""

    loan: Loan


Item = o.Order | Attach | Serve | o.ComputeAnswer | None
Posted = e.Event | Repaid | BeginWake | StopWake | WakeOver


class Orders:
    """The orders of the compute thread, in order; the executor's thread gives them.

    While the compute thread waits for an answer, it is given only orders that make room, because these may be carried
    out in the middle of a command. A plan of the pool is carried out as soon as any order is looked at, before all
    older orders: no command can tell, because what seats hold stays where it is.
    """

    def __init__(self) -> None:
        self.skipped: set[int] = set()  # leases whose frames are not to be begun any more
        self.plans: deque[o.Arrange] = deque()
        self.items: SimpleQueue[Item] = SimpleQueue()
        self.urgent: SimpleQueue[Item] = SimpleQueue()
        self._asked = False  # it waits for an answer
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listening = False  # it waits for frames, and hears the bell
        self._leaving: set[int] = set()  # leases whose seat is to be left, or has been

    def close(self) -> None:
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
            if self._listening:
                os.eventfd_write(self._bell, 1)
        if isinstance(order, o.Own):
            self._leaving.add(order.serial)
        elif isinstance(order, o.Close):
            self._leaving.discard(order.serial)
        elif isinstance(order, o.Return):
            self._leaving.discard(order.begin.serial)

    def next_frame(self, loan: Loan, timeout_s: float) -> bytes | None:
        """The next message on this connection, for the compute thread; None as soon as there is an order to carry out,
        the connection is to be given back, so many wait that the gate has to look, or for ``timeout_s`` seconds none.
        """
        while self.items.empty() and not loan.over and len(loan.heard) < wire.WINDOW_FRAMES:
            if loan.heard:
                return loan.heard.popleft()
            if not self._wait(loan, timeout_s):
                break
        return None

    def pressing(self, loan: Loan) -> bool:
        """Whether `next_frame` would return at once."""
        if self.items.empty() and not loan.over and not loan.heard:
            loan.read()
        return not self.items.empty() or loan.over or bool(loan.heard)

    def _wait(self, loan: Loan, timeout_s: float) -> bool:
        """Until something can be read, or is given; False if time is up."""
        poll = select.poll()
        poll.register(loan.fileno(), select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        self._listening = True
        try:
            ready = poll.poll(timeout_s * 1000) if self.items.empty() else [(self._bell, 0)]
        finally:
            self._listening = False
        for fd, _ in ready:
            if fd == loan.fileno():
                loan.read()
            else:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
        return bool(ready)

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
