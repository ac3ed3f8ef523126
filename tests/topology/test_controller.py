"""The controller as a real process; supervisor, router, store and two executors are the other ends of its links."""

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import msgspec
import orjson
import pytest

from dormouse.core.config import NodeConfig, NodeSection
from dormouse.core.links.link import Link
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.schemas import messages as m

T = TypeVar("T")
WAIT_S = 90.0


def spec(name: str, version: int = 1) -> m.FunctionSpec:
    return m.FunctionSpec(name=name, version=version, entry="f.py", snapshot="s")


def hello(free_nbytes: int = 800) -> m.Hello:
    """A GPU of 1000 bytes, of which activations have 200 of their own."""
    info = m.DeviceInfo(name="Emulated", total_nbytes=1000, capability=(9, 0), multiprocessors=1)
    return m.Hello(
        info=info,
        pool="regions",
        reason="test",
        stats=m.PoolStats(free_nbytes=free_nbytes, largest_nbytes=free_nbytes),
    )


class World:
    """One controller; ``heard`` is what each role has been told, in order."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.directory = tempfile.mkdtemp(prefix="dm-")
        config = NodeConfig(node=NodeSection(run=f"{self.directory}/r", state=f"{self.directory}/s"))
        self.paths = RunPaths(config.run_directory)
        self.paths.make()
        StatePaths(config.state_directory).make()
        self.paths.node_json.write_bytes(msgspec.json.encode(config))
        self.heard: dict[str, list[Any]] = {}
        self.links: dict[str, Link[Any, Any]] = {}
        arguments = ("--run", str(self.paths.run), "--role", "controller", "--epoch", "1")
        self.process = subprocess.Popen([sys.executable, "-m", "dormouse.controller.main", *arguments])
        self.run(self._start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def _start(self) -> None:
        self.news = asyncio.Event()
        self._open("supervisor", "controller", m.ToSupervisor, bind=True)
        for role, incoming in (
            ("router", m.ControllerToRouter),
            ("store", m.ControllerToStore),
            ("gpu0", m.ControllerToExecutor),
            ("gpu1", m.ControllerToExecutor),
        ):
            self._open("controller", role, incoming, bind=False)
        await self.hear("supervisor", m.Ready)
        self.links["supervisor"].send(m.Peers(up={"router": 1, "store": 1, "gpu0": 1, "gpu1": 1}))
        for role in ("gpu0", "gpu1"):
            self.links[role].send(hello())
        for _ in ("gpu0", "gpu1"):  # one for each Hello; until both are heard, a request may go to the only GPU known
            await self.hear("router", m.Device)
        self.links["router"].send(m.Deployed(spec=spec("f")))
        await self.hear("router", m.Kept)

    def _open(self, binder: str, connecter: str, incoming: Any, bind: bool) -> None:
        role = binder if bind else connecter
        heard = self.heard[role] = []

        def hear(message: Any) -> None:
            heard.append(message)
            self.news.set()

        self.links[role] = Link(self.paths.link(binder, connecter, 1), bind=bind, incoming=incoming, on_message=hear)

    async def hear(self, role: str, kind: type[T], wanted: Callable[[Any], bool] = lambda _: True) -> T:
        """The first message of a kind that this role has been told and nobody has taken."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for index, message in enumerate(self.heard[role]):
                    if isinstance(message, kind) and wanted(message):
                        return self.heard[role].pop(index)  # type: ignore[no-any-return]
                self.news.clear()
                await self.news.wait()

    async def status(self) -> Any:
        self.links["router"].send(m.AskStatus(query=1))
        return orjson.loads((await self.hear("router", m.Status)).json)

    async def load(self, instance: str, function: str, nbytes: int) -> None:
        """As store and router tell it; waits until the controller has heard both."""
        self.links["store"].send(m.ModelSize(instance=instance, version=1, nbytes=nbytes))
        await self.answered_store()
        self.links["router"].send(m.InstanceUp(instance=instance, function=function, tenant="default", loaded=True))

    async def answered_store(self) -> None:
        """Whatever the store said before has been heard."""
        self.links["router"].send(m.AskStatus(query=2))
        asked = await self.hear("store", m.AskStore)
        self.links["store"].send(m.StoreReport(query=asked.query, instances=[]))
        await self.hear("router", m.Status, lambda told: told.query == 2)

    async def answered_executor(self, gpu: int) -> None:
        """Whatever this executor said before has been heard."""
        self.links[f"gpu{gpu}"].send(m.Violation(instance="nobody", text=str(gpu)))
        await self.hear("router", m.InstanceViolated, lambda told: told.text == str(gpu))

    async def acquire(self, request: int, instance: str, gpu: int) -> m.Wake:
        self.links["router"].send(m.Acquire(request=request, instance=instance, deadline_ms=1000, version=1))
        return await self.hear(f"gpu{gpu}", m.Wake)

    def stop(self) -> None:
        async def stop() -> int:
            self.links["supervisor"].send(m.Shutdown())
            status = await asyncio.to_thread(self.process.wait, WAIT_S)
            for link in self.links.values():
                link.close()
            return status

        try:
            assert self.run(stop()) == 0
        finally:
            self.process.kill()
            self.process.wait()
            self.runner.close()
            shutil.rmtree(self.directory, ignore_errors=True)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.stop()


def test_the_store_is_told_what_is_kept(world: World) -> None:
    async def work() -> None:
        assert (await world.hear("store", m.Keep)).functions == []  # at its start
        assert (await world.hear("store", m.Keep)).functions == [("f", 1)]
        world.links["router"].send(m.Deployed(spec=spec("g", 3)))
        assert sorted((await world.hear("store", m.Keep)).functions) == [("f", 1), ("g", 3)]
        world.links["router"].send(m.Removed(name="f"))
        assert (await world.hear("store", m.Keep)).functions == [("g", 3)]

    world.run(work())


def test_a_version_whose_model_no_pool_can_hold_is_not_kept(world: World) -> None:
    """It would fit the GPU, but not what activations leave of it; the numbers are said."""

    async def work() -> None:
        await world.load("i2", "f", 900)
        world.links["router"].send(m.Deployed(spec=spec("f", 2)))
        said = await world.hear("router", m.EndInstance)
        assert (said.instance, said.unkept, said.failure.code, said.failure.status) == (
            "i2",
            "f",
            "model_too_large",
            507,
        )
        assert "900" in said.failure.text
        assert "800" in said.failure.text
        await world.load("i3", "f", 800)
        world.links["router"].send(m.Deployed(spec=spec("f", 2)))
        assert (await world.hear("router", m.Kept)).name == "f"

    world.run(work())


def test_a_damaged_model_ends_its_instances(world: World) -> None:
    async def work() -> None:
        world.links["store"].send(m.ModelDamaged(instances=["i1", "i2"], text="segment 7"))
        for name in ("i1", "i2"):
            said = await world.hear("router", m.EndInstance)
            assert (said.instance, said.unkept) == (name, "")
            assert (said.failure.code, said.failure.status, said.failure.retryable) == ("model_damaged", 503, True)
            assert "segment 7" in said.failure.text

    world.run(work())


def test_a_wake_names_worth_and_peers(world: World) -> None:
    async def work() -> None:
        await world.load("i1", "f", 500)
        await world.load("i2", "g", 500)
        first = await world.acquire(1, "i1", gpu=0)
        assert (set(first.worth), first.peers) == ({"i1"}, [])  # what comes has a worth, too
        second = await world.acquire(2, "i2", gpu=1)
        for gpu, wake, resident in (
            (0, first, [("i1", 500)]),
            (1, second, [("i2", 500), ("i1", 300)]),
        ):
            world.links[f"gpu{gpu}"].send(m.Awake(serial=wake.lease.serial, copied_nbytes=500, wake_us=2500))
            world.links[f"gpu{gpu}"].send(
                m.Done(
                    serial=wake.lease.serial,
                    outcome="ended",
                    gpu_us=1,
                    copied_nbytes=500,
                    peer_nbytes=0,
                    file_nbytes=200,
                    resident=resident,
                    peak_activation_nbytes=0,
                    version=1,
                    stats=m.PoolStats(weights_nbytes=500, free_nbytes=300, largest_nbytes=300),
                )
            )
            await world.answered_executor(gpu)
        third = await world.acquire(3, "i1", gpu=0)
        assert (set(third.worth), third.peers) == ({"i1"}, [1])
        await world.hear("router", m.Granted, lambda said: said.request == 3 and said.wake_nbytes == 0)
        world.links["gpu1"].send(m.Pressed(resident=[("i1", 0)], stats=m.PoolStats()))
        place = m.InstanceBytes(
            instance="i1",
            function="f",
            nbytes=500,
            host_nbytes=100,
            file_nbytes=500,
            shared_nbytes=300,
            shared_with=["g"],
        )
        told: Any = {"store": {"answered": False}}
        while not told["store"]["answered"]:  # where we are given no processor for a second, it comes too late
            asking = asyncio.ensure_future(world.status())
            asked = await world.hear("store", m.AskStore)
            world.links["store"].send(m.StoreReport(query=asked.query, instances=[place]))
            told = await asking
        function = told["functions"]["f"]
        assert function["shared_with"] == ["g"]
        assert function["last_wake"]["wake_us"] == 2500
        assert function["last_wake"]["host_nbytes"] == 300
        assert told["gpus"]["0"]["busy_with"] == "f"
        assert told["gpus"]["0"]["pool"] == "regions"

    world.run(work())


def test_status_does_not_wait_for_a_silent_store(world: World) -> None:
    async def work() -> None:
        told = await world.status()  # for how long it does wait: tests/unit/test_controller_queries.py
        assert not told["store"]["answered"]
        asked = await world.hear("store", m.AskStore)
        world.links["store"].send(m.StoreReport(query=asked.query, instances=[]))  # too late: nobody is told again
        await world.answered_store()
        assert [said for said in world.heard["router"] if isinstance(said, m.Status)] == []

    world.run(work())
