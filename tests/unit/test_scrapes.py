"""Who gets a scrape of `/metrics`, when the processes behind it are slow, dead or busy."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from dormouse.core.config import TracingSection
from dormouse.core.decisions.requests.state import RouterState
from dormouse.core.links.link import Link
from dormouse.core.paths import RunPaths
from dormouse.core.sandbox.world import PLAIN_ZYGOTE
from dormouse.router.access.access import Caller
from dormouse.router.admin import scrapes
from dormouse.router.admin.scrapes import MAX, ROLE, Scrapes
from dormouse.router.front.exchange import HttpError
from dormouse.router.traces.outbox import Outbox
from dormouse.schemas import messages as m

OPERATOR = Caller("key op", None, "", frozenset({"metrics"}))


def of_tenant(number: int) -> Caller:
    return Caller(f"key {number}", None, "", frozenset({"metrics"}), "shop")


class World:
    """A router with its scrapes, a metrics process at the other end of a real link, and a controller that is quick."""

    def __init__(self, run: Path) -> None:
        (run / "t").mkdir()
        self.paths = RunPaths(run)
        self.peers: dict[str, int] = {}
        self.down: dict[str, str] = {}
        self.ended: dict[str, tuple[int, float]] = {}
        self.picture = RouterState(4, 64, "1-")
        self.supervisor = self
        self.requests: Any = SimpleNamespace(stats={}, refused={}, knows_catalogue=self._known)
        self.traces = Outbox(self, TracingSection())
        self.instances: Any = SimpleNamespace(hosts={})
        self.jobs: Any = SimpleNamespace(book=SimpleNamespace(words=lambda function, tenant: {}))
        self.wanted: list[m.WantRole] = []
        self.heard: list[m.Scrape] = []
        self._news = asyncio.Event()
        self.answers = self.starts = True
        self.scrapes = Scrapes(self, self._tell, lambda: m.KeptCounted(secrets={"shop": 2}))
        self.link: Link[m.RouterToMetrics, m.MetricsToRouter] | None = None

    async def _known(self) -> bool:
        return True

    def send(self, message: m.WantRole) -> None:
        self.wanted.append(message)
        if self.starts:
            self.up(len(self.wanted))

    def _tell(self, message: m.RouterToController) -> None:
        assert isinstance(message, m.AskMeasures)
        self.scrapes.measured(m.Measures(query=message.query, measures=b"counts"))

    def up(self, epoch: int) -> None:
        path = self.paths.link(ROLE, "router", epoch)
        self.link = Link(path, bind=True, incoming=m.RouterToMetrics, on_message=self._scraped)
        self.peers = {ROLE: epoch}
        self.scrapes.peers_changed(self.peers)

    def die(self) -> None:
        assert self.link is not None
        self.link.close()
        self.peers = {}
        self.scrapes.peers_changed({})

    def _scraped(self, scrape: m.Scrape) -> None:
        self.heard.append(scrape)
        self._news.set()
        if self.answers:
            self.answer(scrape)

    def answer(self, scrape: m.Scrape) -> None:
        assert self.link is not None
        self.link.send(m.Exposition(query=scrape.query, text=b"%d" % len(self.heard)))

    async def hears(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.heard) < count:
                await self._news.wait()
                self._news.clear()

    def close(self) -> None:
        self.scrapes.close()
        if self.link is not None:
            self.link.close()


def played(test: Callable[[World], Awaitable[None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        async def main() -> None:
            world = World(tmp_path)
            try:
                await test(world)
            finally:
                world.close()

        uvloop.run(main())

    run.__name__ = run.__qualname__ = test.__name__
    return run


async def refused(work: Awaitable[bytes]) -> str:
    with pytest.raises(HttpError) as error:
        await work
    assert (error.value.failure.status, error.value.failure.code) == (503, "metrics_unavailable")
    return error.value.failure.text


@played
async def test_the_first_scrape_starts_the_process_and_has_all_parts(world: World) -> None:
    assert await world.scrapes.text(OPERATOR, gzip=False) == b"1"
    assert [each.role for each in world.wanted] == [ROLE]
    (scrape,) = world.heard
    assert (scrape.measures, scrape.whole, scrape.up) == (b"counts", True, {ROLE: 1})
    assert await world.scrapes.text(OPERATOR, gzip=False) == b"2"
    assert len(world.wanted) == 1


@played
async def test_who_asks_again_meanwhile_gets_the_same(world: World) -> None:
    texts = await asyncio.gather(*(world.scrapes.text(OPERATOR, gzip=False) for _ in range(50)))
    assert set(texts) == {b"1"}
    assert len(world.heard) == 1


@played
async def test_tenants_do_not_keep_the_operator_from_it(world: World) -> None:
    world.answers = False
    works = [asyncio.create_task(world.scrapes.text(of_tenant(number), gzip=False)) for number in range(MAX)]
    await world.hears(MAX)
    assert "others are being answered" in await refused(world.scrapes.text(of_tenant(MAX), gzip=False))
    works.append(asyncio.create_task(world.scrapes.text(OPERATOR, gzip=False)))
    await world.hears(MAX + 1)
    for scrape in world.heard:
        world.answer(scrape)
    assert len(await asyncio.gather(*works)) == MAX + 1
    assert [scrape.whole for scrape in world.heard] == [False] * MAX + [True]


@played
async def test_a_process_that_dies_meanwhile_is_an_answer(world: World) -> None:
    world.answers = False
    work = asyncio.create_task(world.scrapes.text(OPERATOR, gzip=False))
    await world.hears(1)
    world.die()
    assert "has died" in await refused(work)
    world.answers = True
    assert await world.scrapes.text(OPERATOR, gzip=False) == b"2"
    assert len(world.wanted) == 2
    assert world.heard[-1].down == []


@played
async def test_what_was_up_and_is_not_any_more_is_told(world: World) -> None:
    await world.scrapes.text(OPERATOR, gzip=False)
    world.peers = {ROLE: 1, "gpu0": 1, PLAIN_ZYGOTE: 1}
    world.scrapes.peers_changed(world.peers)
    world.peers = {ROLE: 1}
    world.scrapes.peers_changed(world.peers)
    await world.scrapes.text(OPERATOR, gzip=False)
    assert world.heard[-1].down == ["gpu0"], "the other one is started again when it is wanted"
    world.down, world.ended = {PLAIN_ZYGOTE: "it cannot be"}, {"gpu0": (2, 5.0)}
    await world.scrapes.text(OPERATOR, gzip=False)
    assert sorted(world.heard[-1].down) == ["gpu0", PLAIN_ZYGOTE]
    assert [each.deaths for each in world.heard[-2:]] == [{}, {"gpu0": 2}]


@played
async def test_one_that_gives_up_does_not_make_room_for_more_work(world: World) -> None:
    """A process that is too slow is not given the same to write again and again."""
    world.answers = False
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await world.scrapes.text(OPERATOR, gzip=False)
    await world.hears(1)
    work = asyncio.create_task(world.scrapes.text(OPERATOR, gzip=False))
    await asyncio.sleep(0)
    world.answer(world.heard[0])
    assert await work == b"1"
    assert len(world.heard) == 1


@played
async def test_why_it_is_not_up_is_the_operators_to_know(world: World) -> None:
    world.starts = False
    world.down = {ROLE: "Traceback: no such module"}
    before, scrapes.START_S = scrapes.START_S, 0.01  # type: ignore[misc]
    try:
        assert "no such module" in await refused(world.scrapes.text(OPERATOR, gzip=False))
        assert "no such module" not in await refused(world.scrapes.text(of_tenant(1), gzip=False))
    finally:
        scrapes.START_S = before  # type: ignore[misc]
