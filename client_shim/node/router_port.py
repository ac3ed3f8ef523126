"""This process's end of its link to the router: requests, leases, and their outcomes.

The main thread also reads this link between requests, so it has a lock of its own. Each wait of a session listens to
its tie too, because a dead router sends nothing.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, ParamSpec, TypeVar

import msgspec

from dormouse.client_shim.node.store_port import hear_why
from dormouse.client_shim.stream.backend import Liveness
from dormouse.client_shim.stream.failures import LeaseLost
from dormouse.core.links.blocking_link import BlockingLink, wait_readable
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, RemoteProtocolError

P = ParamSpec("P")
T = TypeVar("T")

FOREVER_S: Final = 3600.0


class LeaseRefusal(RuntimeError):
    """The router refused a lease; ``code`` says why."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class RouterPort:
    """The typed link to the router. Messages that the reader did not wait for are kept for their waiters."""

    def __init__(self, path: str, tie: Liveness | None) -> None:
        self.link = BlockingLink(path)
        self.lock = threading.RLock()
        self._tie = tie
        self._decoder: msgspec.msgpack.Decoder[m.RouterToInstance] = msgspec.msgpack.Decoder(m.RouterToInstance)
        self._runs: deque[m.Run | m.Exit] = deque()
        self._taken = 0, 0  # the request whose parts were taken last, and how many bytes that nobody has asked for
        self._abandoned: list[int] = []  # requests, of an instance that has many at once
        self._answers: deque[m.LeaseGranted | m.LeaseRefused] = deque()
        self._called: dict[int, m.CallAnswered | None] = {}  # by number: calls that somebody waits for
        self._waiters: set[int] = set()  # descriptors that wake waiters, while another thread may read
        self._main, self._main_wake = threading.get_ident(), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.read_elsewhere: Callable[[], None] = lambda: None  # called when another thread has read a request
        self.granted = 0  # requests of the batch that the last lease is for

    def send(self, message: m.InstanceToRouter) -> None:
        with self.lock:
            try:
                self.link.send(msgspec.msgpack.encode(message))
            except PeerLost:
                hear_why(self._tie)
                raise

    def next_run(self) -> m.Run | m.Exit:
        """Wait for the next request. Raises PeerLost, RemoteProtocolError."""
        self._until(lambda: bool(self._runs))
        return self._runs.popleft()

    def news(self) -> tuple[list[m.Run | m.Exit], list[int]]:
        """Requests that have come, and those that nobody waits for any more. Raises PeerLost, RemoteProtocolError."""
        with self.lock:
            while self._take(0):
                pass
            runs, self._runs = list(self._runs), deque()
            abandoned, self._abandoned = self._abandoned, []
            return runs, abandoned

    @property
    def has_news(self) -> bool:
        """Whether some was read while something else was waited for."""
        return bool(self._runs or self._abandoned or self.link.waiting)

    def check(self) -> None:
        """Raises SessionEnded."""
        if self._tie is not None:
            self._tie.check()

    def forget_answers(self) -> None:
        """Drop the messages about a lease that is over."""
        with self.lock:
            while self._take(0):
                pass
            self._answers.clear()

    def next_answer(self) -> m.Lease:
        """Wait for the answer to NeedLease. Raises Refusal."""
        self._until(lambda: bool(self._answers))
        answer = self._answers.popleft()
        if isinstance(answer, m.LeaseGranted):
            self.granted = answer.requests
            return answer.lease
        raise LeaseRefusal(answer.code, answer.text)

    def wait_taken(self, request: int) -> int:
        """Wait until the client has taken more of this request's parts; returns how many bytes."""
        self._until(lambda: self._taken[0] == request and self._taken[1] > 0)
        with self.lock:
            (_, nbytes), self._taken = self._taken, (request, 0)
        return nbytes

    def call(self, message: m.CallFunction, most: int, given_up: Callable[[], bool] = lambda: False) -> None:
        """Send one that :meth:`call_answer` waits for, when fewer than ``most`` are open, if it is still wanted."""
        while True:
            self._until(lambda: len(self._called) < most or given_up())
            with self.lock:
                if given_up():
                    return
                if len(self._called) < most:
                    self._called[message.number] = None
                    self.send(message)
                    return

    def call_answer(self, number: int) -> m.CallAnswered | None:
        """Wait for the answer to a call; None: it was abandoned. Raises PeerLost, RemoteProtocolError."""
        self._until(lambda: number not in self._called or self._called[number] is not None)
        with self.lock:
            self._wake()  # there is a place
            return self._called.pop(number, None)

    def leave_call(self, number: int) -> None:
        """Its answer is not wanted any more, if it has not been taken."""
        with self.lock:
            self._wake()
            if number in self._called:
                del self._called[number]
                self.send(m.LeaveCall(number=number))

    def _until(self, found: Callable[[], bool]) -> None:
        """Wait for a message that any thread may read: all waiters read, and wake the others. A waiter that is not the
        only one for it looks again.
        """
        own = threading.get_ident() == self._main
        wake = self._main_wake if own else os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        readable = self.link.waiting
        try:
            while True:
                with self.lock:
                    self._waiters.discard(wake)
                    if readable and self._take(0):
                        while self.link.waiting:
                            self._take(0)
                    if found():
                        return
                    self._waiters.add(wake)
                readable = self.link in self.wait([self.link], FOREVER_S, wake)
                if not readable:
                    with suppress(BlockingIOError):
                        os.eventfd_read(wake)
        finally:
            with self.lock:
                self._waiters.discard(wake)
            if not own:
                os.close(wake)

    def _wake(self) -> None:
        for wake in self._waiters:
            os.eventfd_write(wake, 1)

    def wait(self, links: list[BlockingLink], timeout_s: float, *wakes: int) -> list[BlockingLink]:
        """The links among ``links`` that have a message; none if one of ``wakes`` does. Raises SessionEnded."""
        fds = () if self._tie is None else (self._tie.fileno(),)
        ready = interruptible(wait_readable, links, timeout_s, (*wakes, *fds))
        if not ready:
            self.check()
        return ready

    def look(self) -> None:
        """Take in the messages that are there. Raises ConnectionError if the lease's executor is said to be lost."""
        while self._take(0):
            pass
        if self._answers and isinstance(self._answers[0], m.LeaseRefused):
            refusal = self._answers.popleft()
            assert isinstance(refusal, m.LeaseRefused)
            if refusal.code == "executor_lost":
                raise ConnectionError(refusal.text)
            raise LeaseLost(refusal.text)

    def hear(self, timeout_s: float = 0.0) -> m.RouterToInstance | None:
        """The next message, whatever it is. Raises PeerLost, RemoteProtocolError."""
        try:
            data = self.link.recv(timeout_s)
        except PeerLost:
            hear_why(self._tie)
            raise
        if data is None:
            return None
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"router: {error}") from error

    def _take(self, timeout_s: float) -> bool:
        message = self.hear(timeout_s)
        if message is None:
            return False
        if isinstance(message, m.Run | m.Exit):
            self._runs.append(message)
        elif isinstance(message, m.PartsTaken):
            request, nbytes = self._taken
            self._taken = message.request, message.nbytes + (nbytes if request == message.request else 0)
        elif isinstance(message, m.Abandon):
            self._abandoned.append(message.request)
        elif isinstance(message, m.CallAnswered):
            if message.number in self._called:
                self._called[message.number] = message
        else:
            self._answers.append(message)
        self._wake()
        if isinstance(message, m.Run | m.Exit | m.Abandon) and threading.get_ident() != self._main:
            self.read_elsewhere()
        return True


def interruptible(wait: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Wait where a cancellation may be raised; cancel.py knows this function by its name."""
    return wait(*args, **kwargs)
