"""`GET /metrics`: what router and controller have counted is handed to the metrics process, which writes it down.

That process is started when somebody first asks. To write hundreds of functions down takes a tenth of a second, which
no request should wait for. Here, a scrape is one pass over the functions, and bytes that go through.
"""

import asyncio
import time
from collections.abc import Callable
from itertools import count
from typing import Any, Final, Protocol

from dormouse.core.links.link import Link
from dormouse.core.paths import RunPaths
from dormouse.router.access import tenancy
from dormouse.router.access.access import Caller
from dormouse.router.admin import overview
from dormouse.router.decisions.state import RouterState, ServedFunction
from dormouse.router.front.exchange import HttpError
from dormouse.router.front.stats import FunctionStats, TokenStats
from dormouse.schemas import messages as m

ROLE: Final = "metrics"
START_S: Final = 10.0
"""For the process to come up: it imports a library. Prometheus gives a scrape as long by default."""

MEASURES_S: Final = 2.0
"""For the controller; without its part, the rest is written."""

WRITTEN_S: Final = 5.0
MOST: Final = 4
"""Scrapes at the same time. A node has one scraper, or two."""


class Node(Protocol):
    """What is asked of the router."""

    paths: RunPaths
    peers: dict[str, int]
    down: dict[str, str]
    supervisor: Any

    @property
    def picture(self) -> RouterState: ...


class Scrapes:
    """``stats`` are by function; ``tell`` is to the controller."""

    def __init__(
        self, node: Node, stats: dict[str, FunctionStats], tell: Callable[[m.RouterToController], None]
    ) -> None:
        self._node, self._stats, self._tell = node, stats, tell
        self._numbers = count(1)
        self._under_way = 0
        self._held: dict[int, asyncio.Future[bytes]] = {}  # by query
        self._texts: dict[int, asyncio.Future[bytes]] = {}  # likewise
        self._epoch = 0  # of the process that the link is to
        self._link: Link[m.MetricsToRouter, m.RouterToMetrics] | None = None
        self._up = asyncio.Event()

    async def text(self, caller: Caller, gzip: bool) -> bytes:
        """All that the caller may see. Raises HttpError."""
        if self._under_way >= MOST:
            raise _unavailable(f"{MOST} scrapes are under way; ask again later")
        self._under_way += 1
        query = next(self._numbers)
        try:
            await self._expect_process()
            held = await self._ask(self._held, query, lambda: self._tell(m.AskMeasures(query=query)), MEASURES_S)
            text = await self._ask(self._texts, query, lambda: self._send(caller, query, held or b"", gzip), WRITTEN_S)
        finally:
            self._under_way -= 1
        if text is None:
            raise _unavailable("the metrics process has not answered in time; ask again later")
        return text

    async def _expect_process(self) -> None:
        if not self._up.is_set():
            self._node.supervisor.send(m.WantRole(role=ROLE))
        try:
            await asyncio.wait_for(self._up.wait(), START_S)
        except TimeoutError:
            why = self._node.down.get(ROLE, "it takes long")
            raise _unavailable(f"the metrics process is not up: {why}; see its log on the node") from None

    async def _ask(
        self, futures: "dict[int, asyncio.Future[bytes]]", query: int, ask: Callable[[], None], within_s: float
    ) -> bytes | None:
        futures[query] = asyncio.get_running_loop().create_future()
        try:
            ask()
            return await asyncio.wait_for(futures[query], within_s)
        except TimeoutError:
            return None
        finally:
            futures.pop(query, None)

    def _send(self, caller: Caller, query: int, held: bytes, gzip: bool) -> None:
        assert self._link is not None, "the process is up"
        picture, now_s = self._node.picture, time.monotonic()
        functions = [
            counted(picture, name, function, self._stats.get(name), now_s)
            for name, function in picture.functions.items()
            if caller.sees(name, function.spec.tenant)
        ]
        whole = tenancy.sees_all(caller)
        down = [*self._node.down]
        self._link.send(
            m.Scrape(
                query=query, functions=functions, held=held, whole=whole, up=self._node.peers, down=down, gzip=gzip
            )
        )

    # --- what others say

    def peers_changed(self, peers: dict[str, int]) -> None:
        epoch = peers.get(ROLE, 0)
        if epoch == self._epoch:
            return
        self.close()
        self._epoch = epoch
        if epoch:
            path = self._node.paths.link(ROLE, "router", epoch)
            self._link = Link(path, bind=False, incoming=m.MetricsToRouter, on_message=self._written)
            self._up.set()

    def measured(self, message: m.Measures) -> None:
        _settle(self._held, message.query, message.held)

    def _written(self, message: m.Exposition) -> None:
        _settle(self._texts, message.query, message.text)

    def close(self) -> None:
        self._up.clear()
        if self._link is not None:
            self._link.close()
            self._link = None


def counted(
    picture: RouterState, name: str, function: ServedFunction, stats: FunctionStats | None, now_s: float
) -> m.FunctionCounted:
    """``stats`` is None if nobody has asked for it since the router's start."""
    known = NOTHING if stats is None else stats
    return m.FunctionCounted(
        name=name,
        tenant=function.spec.tenant,
        running=sum(overview.running(picture.instances[each]) for each in function.instances),
        waiting=len(function.queue),
        outcomes=known.outcomes,
        in_time=known.in_time,
        late=known.late,
        latency=known.latency.told(),
        spent_s=known.spent_s,
        idle_s=1e9 if stats is None else now_s - stats.asked_s,
        tokens=None if function.spec.llm is None else _tokens(known.tokens),
    )


NOTHING: Final = FunctionStats()


def _tokens(tokens: TokenStats) -> m.TokensCounted:
    return m.TokensCounted(
        first=tokens.first.told(),
        further=tokens.further.told(),
        prompt=tokens.prompt,
        made=tokens.made,
        reused=tokens.reused,
    )


def _settle(futures: "dict[int, asyncio.Future[bytes]]", query: int, data: bytes) -> None:
    if (future := futures.pop(query, None)) is not None and not future.done():
        future.set_result(data)


def _unavailable(text: str) -> HttpError:
    return HttpError(m.Failure(code="metrics_unavailable", status=503, text=text, retryable=True))
