"""Reports from a supervisor to systemd, by the protocol of sd_notify(3): that it is ready, lives, and stops.

Outside of a unit of `Type=notify` nothing is sent, but people who have started it in the foreground can read it on
standard error.
"""

import os
import socket
import sys
from contextlib import suppress
from typing import Final, Self

MAX_STATUS: Final = 500


class ServiceManager:
    """The manager of the unit whose main process this is. ``watched``: it wants to hear that the process lives;
    ``plain``: people want to read on standard error that it is ready, and that it stops.
    """

    def __init__(self, address: str = "", watched: bool = False, plain: bool = False) -> None:
        self.watched = watched
        self._plain = plain and not address
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if address else None
        if self._socket is not None:
            self._socket.setblocking(False)

    @classmethod
    def take(cls, plain: bool = False) -> Self:
        """By this process's environment, out of which it is taken: a process that others start is not the unit's main
        process.
        """
        address, pid = os.environ.pop("NOTIFY_SOCKET", ""), os.environ.pop("WATCHDOG_PID", "")
        watched = bool(os.environ.pop("WATCHDOG_USEC", "")) and pid in ("", str(os.getpid()))
        return cls(address, watched, plain)

    def ready(self, status: str) -> None:
        """Also again, when ``status`` has changed."""
        self._print(f"ready: {status}")
        self._say(f"READY=1\nSTATUS={' '.join(status.split())[:MAX_STATUS]}")

    def alive(self) -> None:
        if self.watched:
            self._say("WATCHDOG=1")

    def main_is(self, pid: int) -> None:
        """The unit's main process is another one from now on, which says the rest."""
        self._say(f"MAINPID={pid}")

    @property
    def environment(self) -> dict[str, str]:
        """By which another process says this in our place."""
        found = {} if self._socket is None else {"NOTIFY_SOCKET": self._address.replace("\0", "@", 1)}
        return found | ({"WATCHDOG_USEC": "1"} if self.watched else {})

    def stopping(self) -> None:
        self._print("stopping")
        self._say("STOPPING=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _print(self, text: str) -> None:
        if self._plain:
            with suppress(OSError):
                sys.stderr.write(f"dormouse: {text}\n")
                sys.stderr.flush()

    def _say(self, text: str) -> None:
        """A manager that does not listen keeps no node from its work."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendto(text.encode(), self._address)
