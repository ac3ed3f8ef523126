"""Messages of instances for their runtimes that come before their lease is known here: the router may tell an instance
of its lease before the controller's wake has come. They wait, bounded. Pure.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from dormouse.schemas import messages as m
from dormouse.schemas.errors import RemoteProtocolError

AHEAD_NBYTES: Final = 64 << 20
"""Of one instance at most: all that 256 long prompts are."""

AHEAD_MESSAGES: Final = 16384
"""Of one instance at most."""

MESSAGE_NBYTES: Final = 256
"""Size that a message counts beside its data: an empty one takes memory too."""

NEVER_BEGAN: Final = 1024


@dataclass(slots=True)
class _Parked:
    """Of one instance."""

    said: dict[int, list[bytes]] = field(default_factory=dict)  # by lease
    messages: int = 0
    nbytes: int = 0


class AheadOfLease:
    """See the module."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Parked] = {}  # by instance
        self._over: dict[str, int] = {}  # by instance: the serial of its last lease that is over
        self._never: deque[int] = deque(maxlen=NEVER_BEGAN)  # leases that are over and that no runtime ever knew

    def may_begin(self, instance: str, serial: int) -> bool:
        """Whether a lease that is not in progress is one to come."""
        return serial > self._over.get(instance, 0) and serial not in self._never

    def park(self, instance: str, message: m.ToRuntime) -> None:
        """Raises RemoteProtocolError if it is too much."""
        parked = self._waiting.setdefault(instance, _Parked())
        nbytes = parked.nbytes + len(message.data) + MESSAGE_NBYTES
        if nbytes > AHEAD_NBYTES:
            raise RemoteProtocolError(f"more than {AHEAD_NBYTES:,} bytes ahead of a lease")
        if parked.messages >= AHEAD_MESSAGES:
            raise RemoteProtocolError(f"more than {AHEAD_MESSAGES:,} messages ahead of a lease")
        parked.messages += 1
        parked.nbytes = nbytes
        parked.said.setdefault(message.serial, []).append(message.data)

    def begun(self, instance: str, serial: int) -> list[bytes]:
        """The messages of the instance for this lease, in order."""
        parked = self._waiting.pop(instance, None)
        return parked.said.get(serial, []) if parked is not None else []

    def over(self, serial: int, instance: str | None) -> str | None:
        """A lease is over; ``instance`` None: no runtime knows of it. Returns the instance to notify."""
        if instance is None:
            waits = (name for name, parked in self._waiting.items() if serial in parked.said)
            if (instance := next(waits, None)) is None:
                self._never.append(serial)  # messages of its instance may still be on their way
                return None
            del self._waiting[instance]
        self._over[instance] = serial
        return instance

    def forget(self, instance: str) -> None:
        """The instance is gone."""
        self._waiting.pop(instance, None)
        self._over.pop(instance, None)
