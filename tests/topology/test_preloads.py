"""Models that come before anybody asks for them: a real executor and store driven by hand, and a whole node."""

import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from language_models import make_folder
from llm_node import ORDINARY, ask, connected, deploy, expected, runtimes

from benchmarks.nodes.testnode import running_node
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

Instance: TypeAlias = Any
Kit: TypeAlias = Any

GPU = {"link": "16MiB"}
"""So that a copy lasts: a model of 12 MiB takes 750 ms."""

NUMEL = 1 << 20
NBYTES = 4 * NUMEL


def floats(value: float) -> bytes:
    return struct.pack("<f", value) * NUMEL


@pytest.fixture
def make(kit: Kit) -> Any:
    """Makes instances that are forgotten after the test."""
    made: list[Instance] = []

    def new() -> Instance:
        made.append(kit.instance(f"p{len(kit.instances)}-{os.urandom(3).hex()}"))
        return made[-1]

    yield new
    for instance in made:
        kit.forget(instance)


Make = Callable[[], Instance]


def preload(kit: Kit, instance: Instance, version: int) -> None:
    worth = {instance.name: 1.0}
    kit.control["gpu0"].send(m.Preload(instance=instance.name, version=version, worth=worth, peers=[]))


async def begun(kit: Kit, instance: Instance, version: int) -> None:
    """Its preload is under way: another one is refused for that. The store's word of its model may come later than it
    was asked for; then it is asked for again.
    """
    preload(kit, instance, version)
    outcome = ""
    while outcome != "busy":
        preload(kit, instance, version)
        outcome = (await preloaded(kit)).outcome
        assert outcome in ("busy", "failed")


async def preloaded(kit: Kit, gpu: int = 0) -> m.Preloaded:
    found: m.Preloaded = await kit.heard[f"gpu{gpu}"].take(lambda message: isinstance(message, m.Preloaded))
    return found


async def request(kit: Kit, instance: Instance, version: int, value: float, gpu: int = 0) -> m.Done:
    """It reads its third storage, of which all must be there."""
    lease = kit.wake(instance, gpu, version)
    instance.define(lease, NUMEL)
    assert await instance.download(lease, 3, NBYTES) == floats(value)
    await instance.end(lease, wait=False)
    done: m.Done = await kit.done(lease)
    return done


async def made(instance: Instance, value: float) -> int:
    version: int = await instance.upload({1: floats(0.5 + value), 2: floats(-value), 3: floats(value)})
    return version


def test_a_preload_moves_the_bytes_and_the_wake_after_it_copies_none(kit: Kit, make: Make) -> None:
    instance = make()

    async def scenario() -> None:
        version = await made(instance, 3.0)
        await begun(kit, instance, version)
        over = await preloaded(kit)
        assert (over.instance, over.outcome, over.copied_nbytes) == (instance.name, "there", 3 * NBYTES)
        assert dict(over.resident)[instance.name] == 3 * NBYTES
        done = await request(kit, instance, version, 3.0)
        assert (done.outcome, done.copied_nbytes) == ("ended", 0)
        preload(kit, instance, version)
        over = await preloaded(kit)
        assert (over.outcome, over.copied_nbytes) == ("there", 0)

    kit.run(scenario())


@pytest.mark.parametrize("own", [True, False])
def test_a_preload_under_way_yields_to_a_request(kit: Kit, make: Make, own: bool) -> None:
    """To one of its own model, which copies only what has not come, and to another's."""
    coming, other = make(), make()

    async def scenario() -> None:
        versions = {coming: await made(coming, 4.0), other: await made(other, 5.0)}
        asked = coming if own else other
        await begun(kit, coming, versions[coming])
        done = await request(kit, asked, versions[asked], 4.0 if own else 5.0)
        over = await preloaded(kit)
        assert (over.instance, over.outcome) == (coming.name, "yielded")
        assert over.copied_nbytes in (0, NBYTES, 2 * NBYTES)
        assert done.copied_nbytes == 3 * NBYTES - (over.copied_nbytes if own else 0)
        done = await request(kit, coming, versions[coming], 4.0)
        assert done.copied_nbytes == (0 if own else 3 * NBYTES - over.copied_nbytes)

    kit.run(scenario())


def test_a_preload_is_given_up_when_the_controller_says_so_or_its_instance_goes(kit: Kit, make: Make) -> None:
    instance, other = make(), make()

    async def scenario() -> None:
        version = await made(instance, 6.0)
        await begun(kit, instance, version)
        kit.control["gpu0"].send(m.StopPreload())
        over = await preloaded(kit)
        assert over.outcome == "yielded"
        assert over.copied_nbytes < 3 * NBYTES
        gone = await made(other, 7.0)
        await begun(kit, other, gone)
        kit.control["gpu0"].send(m.Forget(instance=other.name))
        over = await preloaded(kit)
        assert (over.instance, over.outcome) == (other.name, "yielded")
        assert (await request(kit, instance, version, 6.0)).outcome == "ended"

    kit.run(scenario())


def test_a_preload_does_not_take_the_place_of_what_is_worth_more(kit: Kit, make: Make) -> None:
    """48 MiB hold four of 12 MiB."""
    models = [make() for _ in range(5)]

    async def scenario() -> None:
        versions = [await made(instance, float(number)) for number, instance in enumerate(models)]
        for number in range(4):
            await request(kit, models[number], versions[number], float(number), gpu=1)
        names = [instance.name for instance in models]
        for first, outcome in ((2.0, "refused"), (0.1, "there")):
            worth = dict.fromkeys(names[:4], 2.0) | {names[4]: 1.0, names[0]: first}
            asked = m.Preload(instance=names[4], version=versions[4], worth=worth, peers=[])
            kit.control["gpu1"].send(asked)
            while (over := await preloaded(kit, gpu=1)).outcome == "failed":  # its model is not known there yet
                kit.control["gpu1"].send(asked)
            assert over.outcome == outcome
        assert dict(over.resident) == {names[0]: 0, names[4]: 3 * NBYTES}
        for number in range(1, 5):
            assert (await request(kit, models[number], versions[number], float(number), gpu=1)).copied_nbytes == 0

    kit.run(scenario())


def test_a_frame_is_not_lost_to_a_preload(kit: Kit, make: Make) -> None:
    """A lease that gives the GPU nothing for a while keeps its turn, and a preload that began meanwhile yields."""
    instance, coming = make(), make()

    async def scenario() -> None:
        version, other = await made(instance, 8.0), await made(coming, 9.0)
        lease = kit.wake(instance, 0, version)
        instance.define(lease, NUMEL)
        assert await instance.download(lease, 3, NBYTES) == floats(8.0)
        await kit.heard["gpu0"].take(lambda message: message == m.Idle(serial=lease.serial))
        await begun(kit, coming, other)
        instance.send(lease, [wire.DOWNLOAD, 77, 1, 0, 0])
        assert await instance.answer(lease, 77) == NBYTES
        assert (await preloaded(kit)).outcome == "yielded"
        await instance.end(lease, wait=False)
        await kit.done(lease)

    kit.run(scenario())


CONFIG = (
    '[sandbox]\n[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\npool = "pages"\nseat_idle_ms = 2000\n'
    "[schedule]\npreload = true\n"
)


def test_a_new_executor_has_what_is_asked_for_before_anybody_asks(tmp_path: Path) -> None:
    """A function's model and a language model's, with its runtime: requests after that copy nothing."""
    folder = tmp_path / "llama"
    folder.mkdir()
    model = make_folder(folder)
    with running_node(CONFIG) as node, connected(node) as client:
        deploy(node, "chat", folder)
        node.deployed("sum", ORDINARY)
        for _ in range(3):
            assert node.result("sum", 2) == 999000.0
            assert ask(client, "first", 8) == expected(model, "first", 8)

        def there() -> dict[str, Any]:
            functions = node.status()["functions"]
            return {name: functions[name] for name in ("chat", "sum")}

        before = there()
        os.kill(node.pids()["gpu0"], signal.SIGKILL)
        node.wait(
            lambda: all(
                told["preloads"] > before[name]["preloads"] and told["gpu_nbytes"].get("0", 0) == told["nbytes"]
                for name, told in there().items()
            ),
            60,
            "both models to be there",
        )
        node.wait(lambda: len(runtimes(node)) == 1, 60, "the runtime, for which nobody has asked")
        copied = {name: told["copied_nbytes"] for name, told in there().items()}
        wakes = {name: told["wakes"] for name, told in there().items()}
        assert ask(client, "second", 8) == expected(model, "second", 8)
        assert node.result("sum", 2) == 999000.0
        assert {name: told["copied_nbytes"] for name, told in there().items()} == copied
        assert {name: told["wakes"] for name, told in there().items()} == wakes
        last = node.status()["gpus"]["0"]["last_preload"]
        assert (last["outcome"], last["function"] in ("chat", "sum")) == ("there", True)
