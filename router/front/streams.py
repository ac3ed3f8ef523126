"""A streamed answer between the instance that makes it and the client that takes it.

It is bounded by STREAM_WINDOW_NBYTES: what is beyond that, the instance does not send before it hears that some was
taken.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from dormouse.router.decisions import events as e
from dormouse.schemas import messages as m

Outcome = e.Answer | e.Fail | e.Drop


class AnswerStream:
    """Its parts, in order, and how it ends. ``taken(nbytes)`` is called when the client has so much more."""

    def __init__(self, first: e.Pass, taken: Callable[[int], None]) -> None:
        assert first.kind is not None
        self.kind: m.StreamKind = first.kind
        self.timing = first.timing
        self.outcome: Outcome | None = None  # known once :meth:`parts` has ended
        self._parts = deque([first.body])
        self._taken = taken
        self._news = asyncio.Event()

    def put(self, part: bytes) -> None:
        self._parts.append(part)
        self._news.set()

    def end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._news.set()

    async def parts(self) -> AsyncIterator[bytes]:
        """Each part counts as taken when the next one is asked for."""
        while True:
            while self._parts:
                part = self._parts.popleft()
                yield part
                self._taken(len(part))
            if self.outcome is not None:
                return
            self._news.clear()
            await self._news.wait()
