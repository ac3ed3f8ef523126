"""Calls of a function's own code to other functions: not over HTTP but by its instance's way to the router, so they
need neither the network nor a key. Requests, results and exceptions are those of a Client.

::

    from dormouse import call

    def handle(state, request):
        vector = call("embed", {"text": request["text"]})

A function's deploy names those that it may call (``--call embed``). Decides nothing: the router does.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

from dormouse.client import wire
from dormouse.client.errors import OutsideRequest
from dormouse.client.wire import HttpReply, ToSend

AT_ONCE: Final = 32
"""Calls of one instance that are open; more wait. The router refuses more."""


class OneCall(Protocol):
    """Of the request whose code has made it."""

    def answer(self) -> HttpReply:
        """Send, and wait."""
        ...

    def leave(self) -> None:
        """Its answer is not wanted any more: the waiting thread stops. Does nothing if there is one."""
        ...


Way = Callable[[str, ToSend], OneCall]
"""To the router."""

_way: Way | None = None
_threads: ThreadPoolExecutor | None = None


def connect(way: Way) -> None:
    global _way
    _way = way


def call(function: str, request: Any = None) -> Any:
    """Waits for the function's answer, and returns it. Raises ApiError and its kinds, BadAnswer, OutsideRequest."""
    asked = _made(function, request)
    try:
        return _value(asked.answer())
    finally:
        asked.leave()


async def acall(function: str, request: Any = None) -> Any:
    """The same for coroutines. One that is cancelled gives its call up."""
    global _threads
    asked = _made(function, request)
    _threads = _threads or ThreadPoolExecutor(AT_ONCE, "dormouse-call")
    try:
        return _value(await asyncio.get_running_loop().run_in_executor(_threads, asked.answer))
    finally:
        asked.leave()


def _made(function: str, request: Any) -> OneCall:
    if _way is None:
        raise OutsideRequest("dormouse.call is for functions that a node runs; a program has dormouse.client.Client")
    return _way(function, wire.sent(function, request, {}))


def _value(reply: HttpReply) -> Any:
    if reply.status >= 400:
        raise wire.error_of(reply)
    return wire.decoded(reply)
