"""Calls the user's functions of every kind: plain, ``async def``, generators of both kinds.

A function that returns an iterator answers in parts.

A process that user code has forked ends here, as it would at the end of a script: the links are its parent's.
"""

import inspect
import os
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, ParamSpec, TypeVar

from dormouse.client_shim.instance import report
from dormouse.client_shim.instance.coroutines import Coroutines

P = ParamSpec("P")
T = TypeVar("T")


class Handler:
    """One per instance."""

    def __init__(self, coroutines: Coroutines) -> None:
        self._pid = os.getpid()
        self._coroutines = coroutines
        self._answering: object = None  # the iterator whose parts are the request's answer

    def call(self, code: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Its result, awaited if need be."""
        result = self._guarded(code, *args, **kwargs)
        if inspect.isawaitable(result):
            result = self._guarded(self._coroutines.complete, lambda: result)
        return result

    def parts(self, result: object) -> Generator[Any, None, None] | None:
        """The parts of an answer in parts, or None if it is not one. To be closed."""
        if isinstance(result, AsyncIterator | Iterator):
            self._answering = result
        if isinstance(result, AsyncIterator):
            return self._async_parts(result)
        return self._plain_parts(result) if isinstance(result, Iterator) else None

    def finish(self) -> None:
        """The request is over: end its remaining tasks, and the generator that has answered it.

        CPython 3.12 and 3.13 look for no ``finally`` where a signal meets a loop as it goes back to its beginning.
        """
        iterator, self._answering = self._answering, None
        with suppress(Exception):  # nobody is there to receive it
            if inspect.isasyncgen(iterator) and iterator.ag_frame is not None:
                self._guarded(self._coroutines.complete, iterator.aclose)
            elif inspect.isgenerator(iterator):
                self._guarded(iterator.close)
        self._guarded(self._coroutines.finish)

    def _plain_parts(self, iterator: Iterator[Any]) -> Generator[Any, None, None]:
        try:
            while (part := self._guarded(next, iterator, _END)) is not _END:
                yield part
        finally:
            if inspect.isgenerator(iterator):
                self._guarded(iterator.close)

    def _async_parts(self, iterator: AsyncIterator[Any]) -> Generator[Any, None, None]:
        following = partial(anext, iterator, _END)
        try:
            while (part := self._guarded(self._coroutines.complete, following)) is not _END:
                yield part
        finally:
            if inspect.isasyncgen(iterator):
                self._guarded(self._coroutines.complete, iterator.aclose)

    def _guarded(self, code: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        try:
            result = code(*args, **kwargs)
        except BaseException as error:
            if os.getpid() != self._pid:
                leave(error)
            raise
        if os.getpid() != self._pid:
            leave(SystemExit(0))
        return result


_END = object()


def leave(error: BaseException) -> NoReturn:
    """End a forked process with the status that Python would give it."""
    status = 1
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        status = error.code or 0
    else:
        print(report.describe(error), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
