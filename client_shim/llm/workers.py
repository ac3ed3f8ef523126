"""Work that may take long, in threads beside an instance's loop, which waits for a moment only and goes on.

A thread cannot be ended: abandoned work stays with its thread, and there are no more than ``most`` threads. The library
of grammars lets the interpreter's lock go while it computes.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MOMENT_S: Final = 0.02
"""Nearly all of it takes less; nobody notices when the loop waits that long."""


class Work(Generic[T]):
    """One piece of work. ``cpu_s``: the time that it took."""

    def __init__(self, do: Callable[[], T]) -> None:
        self._do = do
        self._found: list[T] = []
        self._error: BaseException | None = None
        self.given_s, self.begun_s, self.cpu_s = time.monotonic(), 0.0, 0.0
        self.done = self.given_up = False

    def run(self) -> None:
        """In a thread."""
        if not self.given_up:
            self.begun_s, cpu_s = time.monotonic(), time.thread_time()
            try:
                self._found.append(self._do())
            except BaseException as error:  # the outermost frame of this thread; the reader of the result raises it
                self._error = error
            self.cpu_s = time.thread_time() - cpu_s
        self.done = True

    @property
    def result(self) -> T:
        """The result of finished work. Raises the work's own exception."""
        if self._error is not None:
            raise self._error
        return self._found[0]


class Workers:
    """At most ``most`` threads, as many as were needed. ``bell``: a descriptor that can be read when one has ended."""

    def __init__(self, most: int) -> None:
        self._most, self._threads = most, 0
        self._todo: SimpleQueue[Work[object]] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def give(self, do: Callable[[], T]) -> Work[T]:
        work = Work(do)
        self._todo.put(work)  # type: ignore[arg-type]
        if not self._threads:
            self._start()
        return work

    def settle(self, works: Sequence[Work[T]], moment_s: float = MOMENT_S) -> None:
        """Wait a moment for these. If another holds them up, they get a thread of their own."""
        late_s = time.monotonic() + moment_s
        while not all(work.done for work in works):
            try:
                self._ended.get(timeout=max(0.0, late_s - time.monotonic()))
            except Empty:
                if self._threads >= self._most or all(work.begun_s for work in works):
                    break
                self._start()
                late_s = time.monotonic() + moment_s
        with suppress(BlockingIOError):
            os.eventfd_read(self.bell)  # before the caller looks which are done: none is missed

    def _start(self) -> None:
        self._threads += 1
        Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            work = self._todo.get()
            work.run()
            del work
            os.eventfd_write(self.bell, 1)
            self._ended.put(None)
