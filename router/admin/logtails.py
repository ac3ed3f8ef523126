"""Output of functions, past and new, for callers that may read it."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dormouse.core.decisions.requests import queueing
from dormouse.core.decisions.requests.state import RouterState
from dormouse.core.logrecords import unmarked
from dormouse.core.names import NAME, base_of
from dormouse.router.access import tenancy
from dormouse.router.access.access import Caller
from dormouse.router.admin.permits import Permits
from dormouse.router.front.exchange import HttpError
from dormouse.router.instances.functionlog import FunctionLogs
from dormouse.schemas import admin as a
from dormouse.schemas.messages import Failure

MAX: Final = 64
"""Logs that are followed at once, and of these, OF_TENANTS by keys of tenants: the rest is for callers that see all.
On a node of many tenants, OF_ONE by one of them, whatever its keys.
"""

OF_TENANTS: Final = 48
OF_ONE: Final = 16

AGAIN_S: Final = 2.0
"""After which the right to a followed log is checked again, though nothing was printed."""


class LogTails:
    """``admits`` returns whether a caller would be let in now, whatever it was let in with."""

    def __init__(
        self, permits: Permits, logs: FunctionLogs, picture: RouterState, admits: Callable[[Caller], bool]
    ) -> None:
        self._permits, self._logs, self._picture, self._admits = permits, logs, picture, admits
        self._following: Counter[str] = Counter()  # by owner; "": callers that see the whole node

    @contextmanager
    def printed(self, name: str, tenant: str) -> Iterator[asyncio.Queue[bytes]]:
        """Output under this name meanwhile, for a deploy at the node, where few run at once."""
        log = self._logs.begin(name, tenant)
        news = log.follow()
        try:
            yield news
        finally:
            log.unfollow(news)

    async def pieces(self, caller: Caller, act: a.Logs) -> AsyncGenerator[bytes, None]:
        """The log in pieces; if ``follow``, until the function is removed, or is not the caller's to read any more.
        Raises HttpError.
        """
        self._permits.may(caller, act)
        picture, name = self._picture, base_of(act.name)
        known = tenancy.sees(caller, picture, name) and not self._logs.hides(name, caller.tenant)
        left = tenancy.sees_all(caller)  # of a function that was removed, or of none: its owner is unknown
        if not known and not (left and NAME.fullmatch(name) and self._logs.path(name).exists()):
            raise HttpError(queueing.absent(picture, name))
        log = self._logs.of(name)
        told: Callable[[bytes], bytes] = bytes if act.marks else unmarked
        if not act.follow:
            yield told(log.tail(act.lines, act.since_s))
            return
        with self._place(caller):
            news = log.follow()
            try:
                yield told(log.tail(act.lines, act.since_s))
                while log.open:
                    piece = b""
                    with suppress(TimeoutError):
                        async with asyncio.timeout(AGAIN_S):
                            piece = await news.get()
                    if not self._admits(caller):
                        return
                    if not left and not tenancy.sees(caller, picture, name):
                        return
                    if piece:
                        yield told(piece)
            finally:
                log.unfollow(news)

    @contextmanager
    def _place(self, caller: Caller) -> Iterator[None]:
        """Raises HttpError."""
        owner = "" if tenancy.sees_all(caller) else caller.tenant or caller.name
        following, taken = self._following, self._following.total()
        most_own = OF_TENANTS if self._picture.one_tenant else OF_ONE
        bounded = owner and (taken - following[""] >= OF_TENANTS or following[owner] >= most_own)
        if taken >= MAX or bounded:
            whose = f"tenant {owner!r}" if caller.tenant else owner or "who sees the whole node"
            text = f"{whose} follows {following[owner]} logs, and no more may be followed now; stop following one, or "
            text += "read this one without following it"
            raise HttpError(Failure(code="too_many_followers", status=503, text=text, retryable=True))
        following[owner] += 1
        try:
            yield
        finally:
            following[owner] -= 1
            if not following[owner]:
                del following[owner]
