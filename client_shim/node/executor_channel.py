"""This process's end of its link to an executor. A wait for an executor also listens to the router, because a dead
executor sends nothing.
"""

import time
from collections.abc import Callable
from typing import Final

from dormouse.client_shim.node.router_port import RouterPort
from dormouse.core.links.blocking_link import SEND_S, BlockingLink
from dormouse.schemas.errors import PeerLost, RemoteProtocolError
from dormouse.schemas.stream import MAX_FRAME_NBYTES

SLICE_S: Final = 0.05  # how long a wait may be deaf to the router while the main thread reads that link


class ExecutorChannel:
    """One executor, as a `Channel`. ``checkpoint`` is called whenever a wait was interrupted: it may raise.

    An executor that hangs up has died, or has ended this instance. The router says which of the two.
    """

    def __init__(self, path: str, router: RouterPort, checkpoint: Callable[[], None]) -> None:
        self._link = BlockingLink(path, max_nbytes=2 * MAX_FRAME_NBYTES)
        self._router = router
        self._checkpoint = checkpoint

    def send(self, frame: bytes) -> None:
        self._router.check()
        try:
            if not self._link.met:
                self._meet()
            self._link.send(frame)
        except PeerLost as error:
            if not self._link.lost:
                raise ConnectionError(str(error)) from error  # nothing was sent, and nobody else knows
            # else the waiter for a reply gets the reason

    def _meet(self) -> None:
        """Wait until it has bound our endpoint. It may have died before that."""
        deadline_s = time.monotonic() + SEND_S
        while not self._link.meet(SLICE_S):
            if time.monotonic() > deadline_s:
                raise ConnectionError(f"{self._link.path}: nobody has answered for {SEND_S:g} s")
            self._checkpoint()
            if self._router.lock.acquire(blocking=False):
                try:
                    self._router.look()
                finally:
                    self._router.lock.release()

    def recv(self, timeout_s: float) -> bytes | None:
        reply = self._hear()
        if reply is not None or timeout_s <= 0:
            return reply
        deadline_s = time.monotonic() + timeout_s
        while reply is None and (left_s := deadline_s - time.monotonic()) > 0:
            self._checkpoint()
            reply = self._wait(left_s)
        return reply

    def _hear(self) -> bytes | None:
        try:
            return self._link.recv(0)
        except PeerLost:
            return None
        except RemoteProtocolError as error:
            raise ConnectionError(str(error)) from error

    def _wait(self, left_s: float) -> bytes | None:
        links = [] if self._link.lost else [self._link]
        if not self._router.lock.acquire(blocking=False):
            self._router.wait(links, min(left_s, SLICE_S))
            return self._hear()
        try:
            ready = self._router.wait([*links, self._router.link], left_s)
            reply = self._hear()
            if reply is None and self._router.link in ready:
                self._router.look()
            return reply
        finally:
            self._router.lock.release()

    def close(self) -> None:
        self._link.close()
