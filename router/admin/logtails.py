"""What functions have printed, for who may read it, and what they print from then on."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from dormouse.core.logrecords import unmarked
from dormouse.core.names import NAME, base_of
from dormouse.router.access import tenancy
from dormouse.router.access.access import Caller
from dormouse.router.admin.permits import Permits
from dormouse.router.decisions import queueing
from dormouse.router.decisions.state import RouterState
from dormouse.router.front.exchange import HttpError
from dormouse.router.instances.functionlog import FunctionLogs
from dormouse.schemas import admin as a

AGAIN_S: Final = 2.0
"""After which who follows a log is asked for a right to it, though nothing was printed."""


class LogTails:
    """``admits`` says whether a caller would be let in now, whatever it was let in with."""

    def __init__(
        self, permits: Permits, logs: FunctionLogs, picture: RouterState, admits: Callable[[Caller], bool]
    ) -> None:
        self._permits, self._logs, self._picture, self._admits = permits, logs, picture, admits

    @contextmanager
    def printed(self, name: str) -> Iterator[asyncio.Queue[bytes]]:
        """What is printed under this name meanwhile; of who may deploy it."""
        log = self._logs.of(name)
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
        known = tenancy.sees(caller, picture, name)
        left = tenancy.sees_all(caller)  # of a function that was removed, or of none: nobody can say whose it is
        if not known and not (left and NAME.fullmatch(name) and self._logs.path(name).exists()):
            raise HttpError(queueing.absent(picture, name))
        log = self._logs.of(name)
        told: Callable[[bytes], bytes] = bytes if act.marks else unmarked
        if not act.follow:
            yield told(log.tail(act.lines, act.since_s))
            return
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
