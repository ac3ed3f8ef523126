"""GPU-to-GPU copies between real executors, over pools of pages: the nearest source, and what if it goes away."""

import asyncio
import re
import struct
import time
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from dormouse.schemas import messages as m

Kit: TypeAlias = Any

GPU: Final = {"pool": "pages", "link": "300MB", "peer": "3GB", "memory": str(192 << 20)}
GRANULES: Final = 4 + 32  # large and small, of such a pool
NUMEL: Final = 1 << 20
NBYTES: Final = 4 * NUMEL
WAIT_S: Final = 90.0


def floats(value: float) -> bytes:
    return struct.pack("<f", value) * NUMEL


@pytest.fixture
def instance(kit: Kit, request: pytest.FixtureRequest) -> Any:
    for reader in kit.gpus:  # each has mapped the other's pool, so each has got into the other's inbox
        until_it_reads(kit, reader, 1)
    instance = kit.instance(request.node.name[-25:])
    yield instance
    kit.forget(instance)


async def request(kit: Kit, instance: Any, gpu: int, version: int, peers: tuple[int, ...], value: float) -> m.Done:
    lease = kit.wake(instance, gpu, version, peers=peers)
    instance.define(lease, NUMEL)
    for storage in (1, 2, 3):
        assert await instance.download(lease, storage, NBYTES) == floats(100 * value + storage)
    await instance.end(lease, wait=False)
    done: m.Done = await kit.done(lease)
    assert done.outcome == "ended"
    return done


def model(value: float) -> dict[int, bytes]:
    return {storage: floats(100 * value + storage) for storage in (1, 2, 3)}


def test_a_model_comes_from_the_gpu_that_has_it(kit: Kit, instance: Any) -> None:
    async def scenario() -> None:
        version = await instance.upload(model(1.0))
        first = await request(kit, instance, 0, version, (), 1.0)
        assert (first.copied_nbytes, first.peer_nbytes) == (3 * NBYTES, 0)
        second = await request(kit, instance, 1, version, (0,), 1.0)
        assert (second.copied_nbytes, second.peer_nbytes) == (3 * NBYTES, 3 * NBYTES)

    kit.run(scenario())


def test_what_the_peer_has_not_comes_from_the_host(kit: Kit, instance: Any) -> None:
    other = kit.instance("sharer")

    async def scenario() -> None:
        version = await instance.upload(model(2.0))
        lease = kit.wake(instance, 0, version)
        instance.define(lease, NUMEL)
        instance.send(lease, [0, 1, 5.0])  # written there: the peer must not give it away
        assert await instance.download(lease, 1, NBYTES) == floats(206.0)
        await kit.awake(lease)  # the others have arrived
        theirs = await other.upload(model(2.0))  # the same segments
        taken = await request(kit, other, 1, theirs, (0,), 2.0)
        assert (taken.copied_nbytes, taken.peer_nbytes) == (3 * NBYTES, 2 * NBYTES)
        await instance.end(lease, wait=False)
        await kit.done(lease)

    kit.run(scenario())
    kit.forget(other)


def test_a_peer_that_died_is_passed_over(kit: Kit, instance: Any) -> None:
    async def scenario() -> None:
        version = await instance.upload(model(3.0))
        await request(kit, instance, 0, version, (), 3.0)
        await kit.kill("gpu0")
        done = await request(kit, instance, 1, version, (0,), 3.0)
        assert (done.copied_nbytes, done.peer_nbytes) == (3 * NBYTES, 0)
        await kit.restart("gpu0")
        done = await request(kit, instance, 0, version, (1,), 3.0)  # the new one has met its peers
        assert done.copied_nbytes == 3 * NBYTES
        assert done.peer_nbytes in (0, 3 * NBYTES)  # if it has met them by then

    kit.run(scenario())


def until_it_reads(kit: Kit, reader: str, others: int) -> None:
    """Until an executor has mapped the pools of so many others: all of their granules, for reading."""
    maps, end_s = Path(f"/proc/{kit.processes[reader].pid}/maps"), time.monotonic() + WAIT_S
    while len(set(re.findall(r"r--s \S+ \S+ (\d+) +/memfd:dormouse-granule", maps.read_text()))) != GRANULES * others:
        assert time.monotonic() < end_s, maps.read_text()
        time.sleep(0.02)


@pytest.mark.parametrize("gone", [False, True])
def test_a_successor_that_introduces_itself_before_it_is_announced_is_read(kit: Kit, instance: Any, gone: bool) -> None:
    """The supervisor's word and the successor's memory come over two sockets, in any order."""

    async def scenario() -> None:
        version = await instance.upload(model(4.0))
        await kit.kill("gpu0")
        await asyncio.to_thread(until_it_reads, kit, "gpu1", 0)
        kit.spawn("gpu0")
        await kit.said["gpu0"].of(m.Ready)
        up = dict(kit.epochs)
        kit.supervised["gpu1"].send(m.Peers(up=up | {"gpu0": up["gpu0"] - 1}))  # it has not heard of the death yet
        kit.supervised["gpu0"].send(m.Peers(up=up))
        await asyncio.to_thread(until_it_reads, kit, "gpu1", 1)
        if gone:
            kit.supervised["gpu1"].send(m.Peers(up={role: up[role] for role in up if role != "gpu0"}))
        kit.tell_peers()
        await asyncio.to_thread(until_it_reads, kit, "gpu0", 1)
        await kit.introduced("gpu0")
        await request(kit, instance, 0, version, (), 4.0)
        done = await request(kit, instance, 1, version, (0,), 4.0)
        assert done.peer_nbytes == 3 * NBYTES

    kit.run(scenario())
