"""Sends a function's calls (``dormouse.call``) to the router: over the instance's link, as part of the calling request.

The router decides which functions it may call, and the outcome of a call.
"""

import os
import re
from collections.abc import Mapping
from itertools import count
from typing import Final

from dormouse.client.errors import CallCancelled, NotThere, OutsideRequest, RequestRefused
from dormouse.client.inside import AT_ONCE
from dormouse.client.wire import JSON, HttpReply, ToSend
from dormouse.client_shim.instance import context
from dormouse.client_shim.node.router_port import RouterPort
from dormouse.core.quantities import size
from dormouse.schemas import messages as m

_NAME: Final = re.compile("[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")


class CallWay:
    """Of one instance. Threads share it."""

    def __init__(self, router: RouterPort) -> None:
        self._router, self._pid = router, os.getpid()
        self._numbers = count(1)

    def __call__(self, function: str, send: ToSend) -> "InstanceCall":
        """Raises OutsideRequest, NotThere, RequestRefused."""
        request, forked = context.number(), os.getpid() != self._pid
        if not request or forked:
            raise OutsideRequest(_outside(forked))
        if not isinstance(function, str) or not _NAME.fullmatch(function):
            raise NotThere(404, "unknown_function", f"there is no function {str(function)[:100]!r}: give its name")
        if len(send.content) > m.MESSAGE_BODY_NBYTES:
            text = f"a call's request may have at most {size(m.MESSAGE_BODY_NBYTES)}; send less"
            raise RequestRefused(413, "body_too_large", text)
        number = next(self._numbers)
        kind, accept = _types(send.headers)
        message = m.CallFunction(
            number=number, request=request, function=function, body=send.content, kind=kind, accept=accept
        )
        return InstanceCall(self._router, message)


class InstanceCall:
    """As `inside.OneCall`."""

    def __init__(self, router: RouterPort, message: m.CallFunction) -> None:
        self._router, self._message = router, message
        self._left = False

    def answer(self) -> HttpReply:
        """Raises CallCancelled, PeerLost."""
        self._router.call(self._message, AT_ONCE, lambda: self._left)
        answer = self._router.call_answer(self._message.number)
        if answer is None:
            raise CallCancelled(503, "cancelled", "this call was given up")
        return HttpReply(answer.status, answer.headers, answer.body)

    def leave(self) -> None:
        self._left = True
        self._router.leave_call(self._message.number)


def _outside(forked: bool) -> str:
    if forked:
        return "a process that a function has forked cannot call: call before it is forked, or in a thread"
    return (
        "a function calls in the code that answers one request: not in load(), unload() or handle_batch(), nor in what "
        "goes on after them"
    )


def _types(headers: Mapping[str, str]) -> tuple[str, str]:
    """``kind`` and ``accept`` of Call."""
    kind = headers["Content-Type"]
    return "" if kind == JSON else kind, headers.get("Accept", "")
