"""The page that names the instance an executor computes for, and outlives the executor. Decides who is to blame for its
death.

The supervisor makes the page (a memfd), the executor's device thread writes it, and the supervisor reads it when the
executor is dead, so there is one writer and nothing to order. A frame costs two stores of a few bytes. Pure but for the
page.

    byte 0       one of IDLE, BETWEEN, COMMAND, FAILED
    byte 1       length of the name
    bytes 2...   the instance whose commands run (COMMAND), or ran last in the lease that is not over (BETWEEN)
"""

import mmap
import os
import signal
from typing import Final, NamedTuple

EVIDENCE_FD: Final = "DORMOUSE_EVIDENCE_FD"
"""Names the inherited descriptor in an executor's environment."""

NBYTES: Final = mmap.PAGESIZE
IDLE, BETWEEN, COMMAND, FAILED = range(4)

OF_CODE: Final = frozenset(-n for n in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL))
"""Exit statuses that code causes. SIGKILL is not one: it is somebody outside, or the kernel, which lacks memory."""


class PageContents(NamedTuple):
    """The contents of a page."""

    state: int
    instance: str


class Evidence:
    """The page, in an executor. Without ``fd`` nobody reads it."""

    def __init__(self, fd: int = -1) -> None:
        self._page = mmap.mmap(fd, NBYTES)

    @classmethod
    def inherited(cls) -> "Evidence":
        """The supervisor's page, if it gave one."""
        fd = int(os.environ.pop(EVIDENCE_FD, "-1"))
        evidence = cls(fd)
        if fd >= 0:
            os.close(fd)
        return evidence

    def enter(self, instance: str) -> None:
        """A frame's commands begin."""
        name = instance.encode()
        self._page[: 2 + len(name)] = bytes((COMMAND, len(name))) + name

    def leave(self) -> None:
        """The frame's commands have ended; the GPU may still be at them."""
        self._page[0] = BETWEEN

    def clear(self) -> None:
        """The lease is over."""
        self._page[0] = IDLE

    def failed(self) -> None:
        """The device is lost, or the device thread is at its end: if that is in somebody's lease, it is theirs."""
        if self._page[0] in (BETWEEN, COMMAND):
            self._page[0] = FAILED


def make_page() -> int:
    """The descriptor of an empty page."""
    fd = os.memfd_create("dormouse-evidence", os.MFD_CLOEXEC)
    os.ftruncate(fd, NBYTES)
    return fd


def read_page(fd: int) -> PageContents:
    page = os.pread(fd, NBYTES, 0)
    return PageContents(page[0], page[2 : 2 + page[1]].decode(errors="replace"))


def blame(found: PageContents, status: int, watchdog: str) -> str:
    """Why the instance that ``found`` names is to blame for an executor's death; "" if it is not.

    Args:
        status: exit status, or the signal's number below zero.
        watchdog: why the node itself killed the executor; "" if it did not.
    """
    if found.state == FAILED:
        return "the GPU failed in its commands"
    if found.state != COMMAND:
        return ""
    if watchdog:
        return f"the GPU's process was killed in a command of it: {watchdog}"
    return f"a command of it ended the GPU's process by {signal.Signals(-status).name}" if status in OF_CODE else ""


class EvidencePages:
    """Those of a supervisor, by executor's role."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def renew(self, role: str) -> int:
        """The descriptor of a page for an executor that is about to start."""
        if (old := self._fds.pop(role, None)) is not None:
            os.close(old)
        self._fds[role] = make_page()
        return self._fds[role]

    def blame(self, role: str, status: int, watchdog: str) -> tuple[str, str]:
        """The instance that a process has died of, and why; no words if of none, or if it was no executor."""
        if role not in self._fds:
            return "", ""
        found = read_page(self._fds[role])
        return found.instance, blame(found, status, watchdog)
