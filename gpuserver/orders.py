"""What the compute thread has been given to do, in order. Filled by the executor's thread."""

from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue

from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.lease import effects as o
from dormouse.gpuserver.lease import events as e
from dormouse.gpuserver.lease.wakes import BeginWake, StopWake, WakeOver
from dormouse.schemas import messages as m


@dataclass(frozen=True, slots=True)
class Attach:
    """A new instance, and its memory."""

    attach: m.AttachInstance
    arena: SharedMemory


Item = o.Order | Attach | o.Answer | None
Posted = e.Event | BeginWake | StopWake | WakeOver


class Orders:
    """What the compute thread is to do, in order; from the executor's thread.

    While it waits for an answer it is given only what may be done in the middle of a command: what makes room. A plan
    of the pool is carried out as soon as any order is looked at, whatever else was given before it: seats see to it
    that no command can tell.
    """

    def __init__(self) -> None:
        self.skipped: set[int] = set()  # leases whose frames are not to be begun any more
        self.plans: deque[o.Arrange] = deque()
        self.items: SimpleQueue[Item] = SimpleQueue()
        self.urgent: SimpleQueue[Item] = SimpleQueue()
        self._asked = False  # it waits for an answer
        self._leaving: set[int] = set()  # leases whose seat is to be left, or has been

    def heard(self, event: Posted) -> None:
        """Before the event is handled."""
        if isinstance(event, e.MayWrite | e.Relieve):
            self._asked = True

    def give(self, order: Item) -> None:
        if isinstance(order, o.Arrange):
            self.plans.append(order)
        if isinstance(order, o.Answer):
            self._asked = False
            self.urgent.put(order)
        elif self._asked and self._makes_room(order):
            self.urgent.put(order)
        else:
            self.items.put(order)
        if isinstance(order, o.Own):
            self._leaving.add(order.serial)
        elif isinstance(order, o.Close):
            self._leaving.discard(order.serial)
        elif isinstance(order, o.Return):
            self._leaving.discard(order.begin.serial)

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
