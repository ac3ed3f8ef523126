"""Serves `GET /metrics`: hands the counts of router and controller to the metrics process, which formats them.

That process is started with the first scrape. Formatting hundreds of functions takes a tenth of a second, and no
request should wait for that. Here, a scrape is one pass over the functions, and bytes that are passed on.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Final, Protocol

from dormouse.core.decisions.requests.state import RouterState, ServedFunction
from dormouse.core.links.link import Link
from dormouse.core.paths import RunPaths
from dormouse.core.problems import BROKEN, failing
from dormouse.router.access import tenancy
from dormouse.router.access.access import Caller
from dormouse.router.admin import overview
from dormouse.router.front.exchange import HttpError
from dormouse.router.front.requests import Requests
from dormouse.router.front.stats import FunctionStats, TokenStats
from dormouse.router.instances.instances import Instances
from dormouse.router.jobs.jobs import Jobs
from dormouse.router.traces.outbox import Outbox
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost

ROLE: Final = "metrics"
START_S: Final = 10.0
"""For the process to come up: it imports a library. Prometheus gives a scrape as long by default."""

MEASURES_S: Final = 2.0
"""For the controller; without its part, the rest is written."""

PATIENCE_S: Final = 20.0
"""After which the caller is told that it takes too long."""

MAX: Final = 4
"""Scrapes under way at once of callers who see their tenant's functions only; one of each caller. Those who see the
node are few, and are never kept from it.
"""


class Node(Protocol):
    """The part of the router that this module uses."""

    paths: RunPaths
    peers: dict[str, int]
    down: dict[str, str]
    supervisor: Any
    ended: dict[str, tuple[int, float]]
    requests: Requests
    instances: Instances
    traces: Outbox
    jobs: Jobs

    @property
    def picture(self) -> RouterState: ...


class Scrapes:
    """``tell`` is to the controller, ``kept`` says what is kept of tenants."""

    def __init__(
        self, node: Node, tell: Callable[[m.RouterToController], None], kept: Callable[[], m.KeptCounted]
    ) -> None:
        self._node, self._tell, self._kept = node, tell, kept
        self._began_s = time.monotonic()
        self._numbers = count(1)
        self._works: dict[tuple[str, bool, bool], asyncio.Task[bytes]] = {}  # by caller, whether all, whether packed
        self._measures: dict[int, asyncio.Future[bytes]] = {}  # by query
        self._texts: dict[int, asyncio.Future[bytes]] = {}  # likewise
        self.seen: set[str] = set()  # processes that have been up
        self._epoch = 0  # of the process that the link is to
        self._link: Link[m.MetricsToRouter, m.RouterToMetrics] | None = None
        self._up = asyncio.Event()

    async def text(self, caller: Caller, gzip: bool) -> bytes:
        """All that the caller may see. A caller that asks again meanwhile gets the same. Raises HttpError."""
        await self._node.requests.knows_catalogue()
        whole = tenancy.sees_all(caller)
        key = caller.name, whole, gzip
        work = self._works.get(key)
        if work is None:
            if not whole and sum(not all_ for _, all_, _ in self._works) >= MAX:
                raise _unavailable(f"{MAX} others are being answered; ask again later")
            work = self._works[key] = asyncio.get_running_loop().create_task(self._scrape(caller, whole, gzip))
            work.add_done_callback(partial(self._done, key))
        try:
            return await asyncio.wait_for(asyncio.shield(work), PATIENCE_S)
        except TimeoutError:
            raise _unavailable("the metrics process has not answered in time; ask again later") from None

    def _done(self, key: tuple[str, bool, bool], work: "asyncio.Task[bytes]") -> None:
        del self._works[key]
        if not work.cancelled():
            work.exception()  # callers that still wait for it receive it

    async def _scrape(self, caller: Caller, whole: bool, gzip: bool) -> bytes:
        """Until the text is there, however long that takes: a process that is slow is given no more meanwhile."""
        await self._expect_process(whole)
        loop, query = asyncio.get_running_loop(), next(self._numbers)
        measures: asyncio.Future[bytes] = loop.create_future()
        text: asyncio.Future[bytes] = loop.create_future()
        self._measures[query], self._texts[query] = measures, text
        try:
            self._tell(m.AskMeasures(query=query))
            done, _ = await asyncio.wait((measures,), timeout=MEASURES_S)
            self._send(caller, query, measures.result() if done else b"", whole, gzip)
            return await text
        except PeerLost:
            raise _unavailable("the metrics process has died; ask again") from None
        finally:
            del self._measures[query], self._texts[query]

    async def _expect_process(self, whole: bool) -> None:
        if not self._up.is_set():
            self._node.supervisor.send(m.WantRole(role=ROLE))
        try:
            await asyncio.wait_for(self._up.wait(), START_S)
        except TimeoutError:
            why = self._node.down.get(ROLE, "it takes long") if whole else "see its log on the node"
            raise _unavailable(f"the metrics process is not up: {why}") from None

    def _send(self, caller: Caller, query: int, measures: bytes, whole: bool, gzip: bool) -> None:
        """Raises PeerLost."""
        if self._link is None:
            raise PeerLost("it has died meanwhile")
        picture, stats, now_s = self._node.picture, self._node.requests.stats, time.monotonic()
        hosts = self._node.instances.hosts
        functions = [
            counted(
                picture,
                name,
                function,
                overview.own(stats, function.spec),
                now_s,
                now_s - self._began_s,
                self._node.jobs.kept.book.words(name, function.spec.tenant),
                [hosts[each].pid for each in function.instances if each in hosts],
            )
            for name, function in picture.functions.items()
            if caller.sees(name, function.spec.tenant)
        ]
        up = self._node.peers
        down = [*(self.seen - overview.OPTIONAL | {*self._node.down}) - {*up}]
        self._link.send(
            m.Scrape(
                query=query,
                functions=functions,
                measures=measures,
                whole=whole,
                up=up,
                down=down,
                gzip=gzip,
                spans=self._node.traces.spans,
                kept=self._kept() if whole else m.KeptCounted(),
                refused=self._node.requests.refused if whole else {},
                deaths={role: times for role, (times, _) in self._node.ended.items()},
            )
        )

    # --- messages of others

    def peers_changed(self, peers: dict[str, int]) -> None:
        self.seen |= {*peers}
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
        _settle(self._measures, message.query, message.measures)

    def _written(self, message: m.Exposition) -> None:
        _settle(self._texts, message.query, message.text)

    def close(self) -> None:
        self._up.clear()
        if self._link is not None:
            self._link.close()
            self._link = None
        for text in self._texts.values():
            if not text.done():
                text.set_exception(PeerLost("the metrics process has died"))


def counted(
    picture: RouterState,
    name: str,
    function: ServedFunction,
    stats: FunctionStats | None,
    now_s: float,
    lived_s: float,
    jobs: dict[str, int],
    pids: list[int],
) -> m.FunctionCounted:
    """``stats`` is None if nobody has asked for it since the router's start, ``lived_s`` ago."""
    known = overview.NOTHING if stats is None else stats
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
        idle_s=lived_s if stats is None else now_s - stats.asked_s,
        jobs=jobs,
        pids=pids,
        broken=overview.state(picture, function) in BROKEN,
        failing=bool(failing({"recent": known.lately.told(function.spec, now_s)})),
        tokens=None if function.spec.llm is None else _tokens(known.tokens),
    )


def _tokens(tokens: TokenStats) -> m.TokensCounted:
    return m.TokensCounted(
        first=tokens.first.told(),
        further=tokens.further.told(),
        prompt=tokens.prompt,
        made=tokens.made,
        reused=tokens.reused,
    )


def _settle(futures: "dict[int, asyncio.Future[bytes]]", query: int, data: bytes) -> None:
    if (future := futures.get(query)) is not None and not future.done():
        future.set_result(data)


def _unavailable(text: str) -> HttpError:
    return HttpError(m.Failure(code="metrics_unavailable", status=503, text=text, retryable=True))
