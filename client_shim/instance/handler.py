"""Calls the user's functions, whatever kind they are: plain, ``async def``, generators of both kinds.

A function that returns an iterator answers in parts. Coroutines run on one event loop for the instance's life, only
while a request runs: what they leave behind is cancelled at its end, as ``asyncio.run`` does.

Owns the event loop. A process that user code has forked ends here, as it would at the end of a script: the links are
its parent's.
"""

import asyncio
import inspect
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import suppress
from typing import Any, NoReturn, ParamSpec, TypeVar

from dormouse.client_shim.instance import report
from dormouse.client_shim.instance.cancel import RequestCancelled

P = ParamSpec("P")
T = TypeVar("T")


class Handler:
    """One per instance."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any]  # that is being completed
        self._cancelled: RequestCancelled | None = None  # raised where no task was to be interrupted

    def call(self, code: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
        """What it returns, waited for if need be."""
        result = self._guarded(code, *args, **kwargs)
        if inspect.isawaitable(result):
            result = self._guarded(self._complete, result)
        return result

    def parts(self, result: object) -> Generator[Any, None, None] | None:
        """What an answer in parts yields, or None if it is not one. To be closed."""
        if isinstance(result, AsyncIterator):
            return self._async_parts(result)
        return self._plain_parts(result) if isinstance(result, Iterator) else None

    def finish(self) -> None:
        """The request is over: so are the tasks that it has left on the loop."""
        loop = self._loop
        if loop is None or not (tasks := asyncio.all_tasks(loop)):
            return
        for task in tasks:
            task.cancel()
        self._guarded(loop.run_until_complete, asyncio.gather(*tasks, return_exceptions=True))

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()

    def _plain_parts(self, iterator: Iterator[Any]) -> Generator[Any, None, None]:
        try:
            while (part := self._guarded(next, iterator, _END)) is not _END:
                yield part
        finally:
            if inspect.isgenerator(iterator):
                self._guarded(iterator.close)

    def _async_parts(self, iterator: AsyncIterator[Any]) -> Generator[Any, None, None]:
        try:
            while (part := self._guarded(self._complete, anext(iterator, _END))) is not _END:
                yield part
        finally:
            if inspect.isasyncgen(iterator):
                self._guarded(self._complete, iterator.aclose())

    def _complete(self, awaitable: Awaitable[Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_exception_handler(self._escaped)
        self._task = self._loop.create_task(_wait(awaitable))
        try:
            return self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            cancelled, self._cancelled = self._cancelled, None
            if cancelled is not None:
                raise cancelled from None
            raise
        finally:
            if not self._task.done():  # interrupted while nothing ran: what waits is told so, too
                self._task.cancel()
                with suppress(asyncio.CancelledError):
                    self._loop.run_until_complete(self._task)

    def _escaped(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A cancellation that met the loop between two tasks: asyncio would only log it."""
        if isinstance(error := context.get("exception"), RequestCancelled):
            self._cancelled = error
            self._task.cancel()
        else:
            loop.default_exception_handler(context)

    def _guarded(self, code: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        try:
            result = code(*args, **kwargs)
        except BaseException as error:
            if os.getpid() != self._pid:
                _leave(error)
            raise
        if os.getpid() != self._pid:
            _leave(SystemExit(0))
        return result


_END = object()


async def _wait(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _leave(error: BaseException) -> NoReturn:
    """End a forked process with the status that Python would give it."""
    status = 1
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        status = error.code or 0
    else:
        print(report.describe(error), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
