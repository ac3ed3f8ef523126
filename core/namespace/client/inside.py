"""How a function's own code calls other functions: not over HTTP but by its instance's way to the router, so it needs
neither the network nor a key. What is sent, returned and raised is as a Client has it.

::

    from dormouse import call

    def handle(state, request):
        vector = call("embed", {"text": request["text"]})

Whom a function may call, its deploy says (``--call embed``). Decides nothing: the router does.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

from dormouse.client import wire
from dormouse.client.errors import OutsideRequest
from dormouse.client.wire import HttpReply, ToSend

AT_ONCE: Final = 64
"""As many as the router lets an instance have open; more wait here."""


class Way(Protocol):
    """To the router."""

    def begin(self, function: str, send: ToSend) -> int:
        """Send; the number of the call."""
        ...

    def wait(self, number: int) -> HttpReply: ...

    def leave(self, number: int) -> None:
        """Its answer is not wanted any more: who waits for it stops."""
        ...


_way: Way | None = None
_threads: ThreadPoolExecutor | None = None


def connect(way: Way) -> None:
    global _way
    _way = way


def call(function: str, request: Any = None) -> Any:
    """What the function answers. Waits for that. Raises ApiError and its kinds, BadAnswer, OutsideRequest."""
    way = _connected()
    number = way.begin(function, wire.sent(function, request, {}))
    try:
        return _value(way.wait(number))
    except BaseException:
        way.leave(number)
        raise


async def acall(function: str, request: Any = None) -> Any:
    """The same for coroutines. One that is cancelled gives its call up."""
    global _threads
    way = _connected()
    number = way.begin(function, wire.sent(function, request, {}))
    _threads = _threads or ThreadPoolExecutor(AT_ONCE, "dormouse-call")
    try:
        return _value(await asyncio.get_running_loop().run_in_executor(_threads, way.wait, number))
    except BaseException:
        way.leave(number)
        raise


def _connected() -> Way:
    if _way is None:
        raise OutsideRequest("dormouse.call is for functions that a node runs; a program has dormouse.client.Client")
    return _way


def _value(reply: HttpReply) -> Any:
    if reply.status >= 400:
        raise wire.error_of(reply)
    return wire.decoded(reply)
