"""The event loop of an instance: runs the function's coroutines during a request, and ends their remaining tasks.

A request is cancelled here as ``asyncio`` does it at SIGINT: the running task is cancelled at its next ``await``. An
exception between two lines of the loop could lose a callback, and with it the task that waits for it (cancel.py keeps
it away).
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Coroutines:
    """One per instance. Each request has one task that is waited for, and may make others."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None  # that is being completed, or was
        self._ends: BaseException | None = None  # the completion ends with this, whatever its task makes of it

    def complete(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine in a task and return its result: none is begun and then abandoned, wherever a signal comes.
        Raises the exception that ``cancel`` was given meanwhile.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_exception_handler(self._escaped)
        loop = self._loop
        self._ends = None
        self._task = task = loop.create_task(_wait(begin))
        try:
            return loop.run_until_complete(task)
        finally:
            if not task.done():  # another task has ended the loop, such as by SystemExit
                task.cancel()
                with suppress(asyncio.CancelledError):
                    loop.run_until_complete(task)
            ends, self._ends = self._ends, None
            if ends is not None:
                raise ends from None

    def cancel(self, ends: BaseException) -> bool:
        """For signal handlers: let the completion end with this. False if there is none, or it is over."""
        if self._loop is None or self._task is None or not self._task.cancel():
            return False
        self._ends = ends
        self._loop.call_soon_threadsafe(int)  # it may be about to wait
        return True

    @property
    def aside(self) -> bool:
        """Whether another task than the completion's is running."""
        return self._loop is not None and asyncio.current_task(self._loop) not in (None, self._task)

    def finish(self) -> None:
        """The request is over: end its remaining tasks."""
        loop = self._loop
        if loop is None or not (tasks := asyncio.all_tasks(loop)):
            return
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()

    def _escaped(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio would only log a callback's exception."""
        error = context.get("exception")
        if error is None or isinstance(error, Exception):
            loop.default_exception_handler(context)
        elif not self.cancel(error):
            self._ends = error


async def _wait(begin: Callable[[], Awaitable[T]]) -> T:
    return await begin()
