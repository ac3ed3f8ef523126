"""One runtime as its executor sees it: a process, or messages that wait for one; and its interface to the executor."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dormouse.core.links.fds import PacketSocket
from dormouse.schemas import messages as m

Connection = PacketSocket[m.RuntimeToExecutor, m.ExecutorToRuntime]


class RuntimeHost(Protocol):
    """The owner of runtimes: the executor."""

    loop: asyncio.AbstractEventLoop
    log: Any

    def reply(self, instance: str, message: bytes) -> None: ...

    def hears(self, instance: str) -> bool: ...

    def expel(self, instance: str, text: str, story: str) -> None: ...

    def to_controller(self, message: m.ExecutorToController) -> None: ...


@dataclass(eq=False)
class Runtime:
    """One process, or the messages that wait for it to be there."""

    number: int
    name: str
    connection: Connection
    uid: int = 0
    members: dict[str, None] = field(default_factory=dict)  # instances that it has computed for, and that are there
    serials: dict[int, str] = field(default_factory=dict)  # its leases: their instances
    pidfd: int = -1
    waiting: deque[tuple[m.ExecutorToRuntime, list[int]]] = field(default_factory=deque)  # not taken yet
    owed: dict[type[Any], asyncio.TimerHandle] = field(default_factory=dict)  # answers, and until when
    dead: bool = False
    ending: bool = False  # it is to be gone

    @property
    def pid(self) -> int:
        """As its own executor sees it; 0 if it is not there."""
        if self.dead or self.pidfd < 0:
            return 0
        fields = Path(f"/proc/self/fdinfo/{self.pidfd}").read_text().split()
        return max(0, int(fields[fields.index("Pid:") + 1]))
