"""Ends a `dormouse run` program whose session the node has ended. Its GPU state is gone; a server that takes each error
for one request's would answer with errors for ever, and nobody would start it again.
"""

import os
import select
import signal
import sys
import threading
from typing import Final

from dormouse.client_shim.node.attachment import Attachment
from dormouse.client_shim.stream.failures import SessionEnded
from dormouse.core.exits import SESSION_ENDED
from dormouse.core.terminal import harmless

TOLD_S: Final = 5.0
"""A program that computes gets an exception, and has this long to end by it."""

END_S: Final = 10.0
"""From its interruption on: for requests that it answers without the GPU, and for saving its data."""


class EndOfSession:
    """Interrupts the program after the session, and ends it if it goes on."""

    def __init__(self, attachment: Attachment) -> None:
        self.interrupted = False
        self._attachment = attachment
        self._program_ends = os.eventfd(0)
        self._thread = threading.Thread(target=self._watch, name="dormouse-session-end", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        over = ""
        while not over:
            if self._wait(None, self._attachment.fileno()):
                return
            try:
                self._attachment.check()
            except SessionEnded as error:
                over = str(error)
        if self._wait(TOLD_S):
            return
        print(f"dormouse: {harmless(over)}; this program is interrupted", file=sys.stderr, flush=True)
        self.interrupted = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)  # that thread, or a system call in which it waits would go on
        if not self._wait(END_S):
            print(f"dormouse: it has not ended within {END_S:g} s, and is ended", file=sys.stderr, flush=True)
            os._exit(SESSION_ENDED)

    def _wait(self, seconds: float | None, *fds: int) -> bool:
        """Until the program ends, or one of ``fds`` can be read; whether it ends."""
        poll = select.poll()
        for fd in (self._program_ends, *fds):
            poll.register(fd, select.POLLIN)
        ready = poll.poll(None if seconds is None else seconds * 1000)
        return any(fd == self._program_ends for fd, _ in ready)

    def close(self) -> None:
        os.eventfd_write(self._program_ends, 1)
        self._thread.join()
        os.close(self._program_ends)
