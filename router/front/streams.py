"""A streamed answer between the instance that makes it and the client that takes it.

It is bounded by STREAM_WINDOW_NBYTES: the instance sends nothing beyond that before it is told that some was taken.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable

from dormouse.core.decisions.requests import events as e
from dormouse.schemas import messages as m
from dormouse.schemas.llm import DONE

Outcome = e.Answer | e.Fail | e.Drop


class AnswerStream:
    """Its parts, in order, and how it ends. ``taken(nbytes)`` is called when the client has so much more, in steps of
    TAKEN_NBYTES or more.

    A part that comes while all before it are taken is offered to ``direct``, if there is one: it takes it at once, with
    no task that wakes up for it, or refuses.
    """

    def __init__(self, begin: e.BeginStream, taken: Callable[[int], None]) -> None:
        self.kind = begin.kind
        self.timing = begin.timing
        self.head = begin.head
        self.direct: Callable[[bytes], bool] | None = None
        self.last = b""  # the part that was given out last
        self.outcome: Outcome | None = None  # known once :meth:`parts` has ended
        self._parts: deque[bytes] = deque()
        self._taken = taken
        self._untold_nbytes = 0  # that are taken
        self._idle = False  # :meth:`parts` has given out all that there is, and waits
        self._silence: _Silence | None = None
        self._news = asyncio.Event()

    @property
    def told_its_end(self) -> bool:
        """Whether the client has the event after which it may leave. OpenAI's clients do, and wait for no more."""
        return self.kind == m.SSE and self.last.endswith(DONE)

    def put(self, part: bytes) -> None:
        if not part:
            return
        if self._idle and self.direct is not None and self.direct(part):
            assert self._silence is not None, "somebody waits in parts()"
            self._silence.begins()
            self.last = part
            self._took(len(part))
            return
        self._parts.append(part)
        self._wake()

    def end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._wake()

    def _wake(self) -> None:
        self._idle = False  # what comes now comes behind what waits
        self._news.set()

    async def parts(self, silence_s: float = math.inf) -> AsyncGenerator[bytes]:
        """Each part counts as taken when the next one is asked for. Where none comes for ``silence_s``, and after as
        long again, an empty one does.
        """
        with _Silence(silence_s, self._news.set) as self._silence:
            while True:
                while self._parts:
                    self.last = self._parts.popleft()
                    yield self.last
                    self._took(len(self.last))
                if self.outcome is not None:
                    return
                self._silence.begins()
                self._idle = True
                self._news.clear()
                await self._news.wait()
                self._idle = False
                if not self._parts and self.outcome is None:
                    yield b""

    def _took(self, nbytes: int) -> None:
        self._untold_nbytes += nbytes
        if self._untold_nbytes >= m.TAKEN_NBYTES:
            told, self._untold_nbytes = self._untold_nbytes, 0
            self._taken(told)


class _Silence:
    """Calls when it lasts so long. One timer for all parts of a stream: beginning anew is cheap."""

    def __init__(self, after_s: float, call: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._after_s, self._call = after_s, call
        self._since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begins(self) -> None:
        self._since_s = self._loop.time()
        if self._timer is None and self._after_s < math.inf:
            self._timer = self._loop.call_later(self._after_s, self._look)

    def _look(self) -> None:
        left_s = self._since_s + self._after_s - self._loop.time()
        self._timer = None if left_s <= 0 else self._loop.call_later(left_s, self._look)
        if left_s <= 0:
            self._call()

    def __enter__(self) -> "_Silence":
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
