"""Decides which frames of which instance reach the compute thread; pure, no sockets and no torch.

An instance is hostile until its frame has passed here. States of a frame, by its lease's serial::

    serial > newest started lease                              parked, at most a window of them, until that lease
                                                               starts (for whomever) or the instance is gone
    serial = lease in progress, right instance and secret,
        next number, within the window                         delivered; kept while the lease has no turn
    serial = lease in progress, other instance or secret       violation
    serial <= newest started lease, not in progress            refused (late); too many: violation

Refusing rather than punishing late frames matters: an honest instance has a window of frames on the way when its
lease is revoked.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import msgpack
from msgspec import Struct

from dormouse.schemas import stream as wire

LATE_FRAMES: Final = 4 * wire.WINDOW_FRAMES
"""Late frames between two leases after which it is a flood: an honest instance has one window on the way."""

_FRAME_FIELDS: Final = 5
_UINTS: Final = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}  # msgpack's unsigned integers: bytes after the type byte


class Malformed(Exception):
    """Not a frame."""


class FrameHeader(Struct, frozen=True, gc=False):
    """The part of a frame that is read before the frame is trusted."""

    serial: int
    secret: int
    number: int


def read_header(data: bytes) -> FrameHeader:
    """The first three fields of a frame; nothing else is decoded. Raises Malformed."""
    if not data or data[0] != 0x90 | _FRAME_FIELDS:
        raise Malformed(f"a frame is an array of {_FRAME_FIELDS}")
    position, values = 1, []
    for _ in range(3):
        if position >= len(data):
            raise Malformed("a frame ends within its header")
        kind = data[position]
        position += 1
        if kind < 0x80:
            values.append(kind)
            continue
        size = _UINTS.get(kind)
        if size is None or position + size > len(data):
            raise Malformed("serial, secret and number of a frame are unsigned integers")
        values.append(int.from_bytes(data[position : position + size], "big"))
        position += size
    return FrameHeader(*values)


def follows(data: bytes, header: FrameHeader, count: int) -> bool:
    """Whether this frame is the one after ``count`` more frames behind ``header``, under the same lease."""
    try:
        return read_header(data) == FrameHeader(header.serial, header.secret, header.number + count)
    except Malformed:
        return False


def refusal(serial: int, reason: str, kind: str = "") -> bytes:
    """The reply to a frame that comes too late."""
    return bytes(msgpack.packb([wire.REFUSED, serial, reason, kind]))


class Deliver(Struct, frozen=True, gc=False):
    """Give the frame to the compute thread."""

    instance: str
    serial: int
    data: bytes


class FrameKept(Struct, frozen=True, gc=False):
    """A frame waits here until its lease has a turn."""

    serial: int


class Refuse(Struct, frozen=True, gc=False):
    """Tell the instance that this lease is over."""

    instance: str
    serial: int
    reason: str


class Violate(Struct, frozen=True, gc=False):
    """The instance broke the protocol: end it."""

    instance: str
    text: str


Action = Deliver | FrameKept | Refuse | Violate


@dataclass
class _Lease:
    serial: int
    secret: int
    instance: str
    open: bool = True  # it has a turn
    number: int = 0  # of the last frame delivered or kept
    unacknowledged: int = 0
    kept: deque[bytes] = field(default_factory=deque)


@dataclass
class _Sender:
    parked: deque[tuple[FrameHeader, bytes]] = field(default_factory=deque)
    late: int = 0
    expelled: bool = False


class FrameGate:
    """Admission for one executor."""

    def __init__(self, window: int = wire.WINDOW_FRAMES) -> None:
        self._window = window
        self._newest = 0  # serial of the newest lease that has started
        self._skipped: set[int] = set()  # serials beyond that one whose leases will never start
        self._leases: dict[int, _Lease] = {}  # in progress, by serial
        self._senders: dict[str, _Sender] = {}  # by instance
        self._early: dict[str, _Sender] = {}  # those of them that have parked frames

    def attach(self, instance: str) -> None:
        self._senders[instance] = _Sender()

    def detach(self, instance: str) -> None:
        self._senders.pop(instance, None)
        self._early.pop(instance, None)

    def start(self, serial: int, secret: int, instance: str) -> list[Action]:
        """A lease starts, with a turn. Frames that its instance has parked for it go on; frames that others have parked
        for it are a violation; frames parked for older leases are refused.
        """
        self._leases[serial] = _Lease(serial, secret, instance)
        if instance in self._senders:
            self._senders[instance].late = 0
        self._newest = max(self._newest, serial)  # older ones are no longer to come
        self._skipped = {skipped for skipped in self._skipped if skipped > self._newest}
        return self._judge_again()

    def skip(self, serial: int) -> list[Action]:
        """A lease was revoked before it started: its frames are late. Older ones may still be to come."""
        self._skipped.add(serial)
        return self._judge_again()

    def _judge_again(self) -> list[Action]:
        """Judge all parked frames again, whoever sent them."""
        if not self._early:
            return []
        early, self._early = self._early, {}
        actions: list[Action] = []
        for instance, sender in early.items():
            parked, sender.parked = sender.parked, deque()
            for header, data in parked:
                actions += self._admit(instance, sender, header, data)
        return actions

    def close(self, serial: int) -> None:
        """The lease has no turn for now."""
        self._leases[serial].open = False

    def open(self, serial: int) -> list[Action]:
        """The lease has a turn again: its kept frames go on."""
        lease = self._leases[serial]
        lease.open = True
        kept, lease.kept = lease.kept, deque()
        return [Deliver(lease.instance, serial, data) for data in kept]

    def end(self, serial: int) -> list[Refuse]:
        """The lease is over; its instance is notified if it still has frames on the way that will have no reply."""
        lease = self._leases.pop(serial, None)
        if lease is not None and lease.unacknowledged and lease.instance in self._senders:
            return [Refuse(lease.instance, serial, "the lease is over")]
        return []

    def frame(self, instance: str, data: bytes) -> list[Action]:
        """A frame has arrived at this instance's endpoint."""
        sender = self._senders.get(instance)
        if sender is None or sender.expelled:
            return []
        try:
            header = read_header(data)
        except Malformed as error:
            return self.expel(instance, str(error))
        return self._admit(instance, sender, header, data)

    def passed(self, serial: int, frames: int) -> None:
        """The compute thread has received so many frames of the lease itself, each the next one."""
        if (lease := self._leases.get(serial)) is not None:
            lease.number += frames
            lease.unacknowledged += frames

    def acknowledge(self, serial: int, frames: int) -> None:
        """The compute thread has executed this many frames of the lease."""
        if (lease := self._leases.get(serial)) is not None:
            lease.unacknowledged -= frames

    def expel(self, instance: str, text: str) -> list[Action]:
        """Receive nothing more from this instance; reported once."""
        sender = self._senders.get(instance)
        if sender is None or sender.expelled:
            return []
        sender.expelled = True
        sender.parked.clear()
        self._early.pop(instance, None)
        return [Violate(instance, text)]

    def _admit(self, instance: str, sender: _Sender, header: FrameHeader, data: bytes) -> list[Action]:
        if sender.expelled:
            return []
        if header.serial > self._newest and header.serial not in self._skipped:
            if len(sender.parked) >= self._window:
                return self.expel(instance, f"more than {self._window} frames ahead of a lease")
            sender.parked.append((header, data))
            self._early[instance] = sender
            return []
        lease = self._leases.get(header.serial)
        if lease is None:
            sender.late += 1
            if sender.late > LATE_FRAMES:
                return self.expel(instance, f"more than {LATE_FRAMES} frames of leases that are over")
            return [Refuse(instance, header.serial, "the lease is over")]
        if lease.instance != instance or header.secret != lease.secret:
            return self.expel(instance, f"a frame under lease {header.serial}, which is not this instance's")
        if header.number != lease.number + 1:
            return self.expel(instance, f"frame {header.number} after frame {lease.number}")
        if lease.unacknowledged >= self._window:
            return self.expel(instance, f"more than {self._window} frames without acknowledgement")
        lease.number += 1
        lease.unacknowledged += 1
        if not lease.open:
            lease.kept.append(data)
            return [FrameKept(lease.serial)]
        return [Deliver(instance, lease.serial, data)]
