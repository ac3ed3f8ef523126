"""The device thread's half: computation before the copy has ended, revocation in the middle of it, exactly one Done."""

import queue
from collections.abc import Iterator
from typing import Any, TypeVar

import msgpack
import pytest

from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.engine import Effect, Engine, Reply, Violated
from dormouse.gpuserver.host_device import HostDevice
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

MIB = 1 << 20
ARENA = m.Arena(request_nbytes=0, response_nbytes=0, stream_nbytes=4096)
SEGMENTS = [m.Segment(storage=n, segment=10 + n, slab=0, offset=n * MIB, nbytes=MIB) for n in range(4)]
META = [0, ["uint8", [16], [1], 0, 0]]
T = TypeVar("T")


class World:
    """An engine on this thread; its slab holds a byte per storage. The link moves a chunk in 100 ms."""

    def __init__(self) -> None:
        self.device = HostDevice(6 * MIB, link_nbytes_s=10 * MIB, chunk_nbytes=MIB, poison=True)
        self.effects: queue.SimpleQueue[Effect] = queue.SimpleQueue()
        self.engine = Engine(self.device, self.effects.put)
        slab = SharedMemory.create("slab", 4 * MIB)
        for number in range(4):
            slab.view[number * MIB : (number + 1) * MIB] = bytes([number]) * MIB
        self.engine.slab(0, slab)
        self.seen: list[Effect] = []
        for name in "ab":
            attach = m.AttachInstance(instance=name, tenant="t", directory="", uid=0, arena=ARENA, quota_nbytes=0)
            self.engine.attach(attach, SharedMemory.create("arena", ARENA.nbytes))

    def wake(self, serial: int, instance: str = "a") -> None:
        lease = m.Lease(gpu=0, epoch=1, serial=serial, secret=5)
        self.engine.wake(m.Wake(lease=lease, instance=instance, version=1, evict=[]))

    def frame(self, serial: int, number: int, *commands: Any, metas: Any = ()) -> None:
        data = msgpack.packb([serial, 5, number, [list(metas), []], list(commands)])
        self.engine.frame("a", serial, data)

    def until(self, kind: type[T]) -> T:
        """The next effect of a kind; those before it are kept in ``seen``."""
        while not isinstance(effect := self.effects.get(timeout=10), kind):
            self.seen.append(effect)
        return effect

    def nothing_more(self) -> bool:
        return self.effects.empty()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for name in "ab":
        world.engine.forget(name)
    world.device.set_activation_limit(1 << 62)
    world.device.close()


def test_the_first_segments_are_used_while_the_last_are_on_their_way(world: World) -> None:
    world.engine.manifest(m.Manifest(instance="a", version=1, segments=SEGMENTS))
    world.wake(1)
    world.frame(1, 1, wire.DOWNLOAD, 7, 1, 0, -1, metas=META)
    reply = world.until(Reply)
    assert not any(isinstance(effect, m.Awake) for effect in world.seen)
    assert msgpack.unpackb(reply.messages[0]) == [wire.VALUE, 7, bytes([1]) * 16]
    world.frame(1, 2, wire.END, 8, 0)
    done = world.until(m.Done)
    assert any(isinstance(effect, m.Awake) for effect in world.seen)
    assert (done.outcome, done.copied_nbytes, done.resident_nbytes) == ("ended", 4 * MIB, 4 * MIB)


def test_revoked_while_copying(world: World) -> None:
    world.engine.manifest(m.Manifest(instance="a", version=1, segments=SEGMENTS))
    world.wake(1)
    world.frame(1, 1, wire.DOWNLOAD, 7, 0, 0, -1, metas=META)
    world.engine.revoke(1)
    world.engine.revoke(1)
    done = world.until(m.Done)
    assert done.outcome == "revoked"
    assert MIB <= done.copied_nbytes == done.resident_nbytes < 4 * MIB
    assert not any(isinstance(effect, m.Awake) for effect in world.seen)
    assert world.nothing_more()
    world.wake(2)
    world.frame(2, 1, wire.DOWNLOAD, 7, 3, 0, -1)
    assert msgpack.unpackb(world.until(Reply).messages[0])[2] == bytes([3]) * 16
    world.engine.revoke(2)
    assert world.until(m.Done).copied_nbytes == 4 * MIB - done.copied_nbytes


def test_frames_that_a_revocation_has_overtaken_are_not_run(world: World) -> None:
    world.wake(1)
    world.engine.revoked = 1
    world.frame(1, 1, wire.SYNC, 3)
    world.engine.revoke(1)
    world.until(m.Done)
    assert not any(isinstance(effect, Reply) for effect in world.seen)


def test_a_wrong_frame_ends_the_lease_once(world: World) -> None:
    world.wake(1)
    world.frame(1, 1, -77)
    world.frame(1, 2, wire.SYNC, 3)
    world.engine.violate(1)
    assert world.until(Violated).instance == "a"
    assert world.until(m.Done).outcome == "violated"
    assert world.nothing_more()


def test_an_instance_that_goes_in_its_lease(world: World) -> None:
    world.engine.manifest(m.Manifest(instance="a", version=1, segments=SEGMENTS))
    world.wake(1)
    world.engine.forget("a")
    assert world.until(m.Done).outcome == "revoked"
    assert world.engine.residency.used_nbytes == 0
    world.engine.dropped("a")
    assert world.until(m.Settled).version == -1


def test_a_newer_manifest_waits_for_the_lease_and_drops_what_is_stale(world: World) -> None:
    world.engine.manifest(m.Manifest(instance="a", version=1, segments=SEGMENTS[:2]))
    assert world.until(m.Settled).version == 1
    world.wake(1)
    world.engine.manifest(m.Manifest(instance="a", version=2, segments=SEGMENTS[1:3]))
    world.frame(1, 1, wire.DOWNLOAD, 7, 0, 0, -1, metas=META)
    assert msgpack.unpackb(world.until(Reply).messages[0])[2] == bytes(16)
    assert not any(isinstance(effect, m.Settled) for effect in world.seen)
    world.frame(1, 2, wire.END, 8, 0)
    assert world.until(m.Settled).version == 2
    done = world.until(m.Done)
    assert (done.version, done.resident_nbytes) == (2, MIB)


def test_manifests_of_strangers_are_settled_at_once(world: World) -> None:
    world.engine.manifest(m.Manifest(instance="stranger", version=4, segments=[]))
    assert world.until(m.Settled) == m.Settled(instance="stranger", version=4)


def test_eviction_takes_the_storages_out_of_reach(world: World) -> None:
    world.engine.manifest(m.Manifest(instance="a", version=1, segments=SEGMENTS))
    world.engine.manifest(m.Manifest(instance="b", version=1, segments=[SEGMENTS[0], SEGMENTS[1], SEGMENTS[2]]))
    for serial, instance, evicted in ((1, "a", []), (2, "b", ["a"]), (3, "a", ["b"])):
        world.wake(serial, instance)
        world.until(m.Awake)
        if instance == "a":
            world.frame(serial, 1, wire.DOWNLOAD, 7, 2, 0, -1, metas=META if serial == 1 else ())
            assert msgpack.unpackb(world.until(Reply).messages[0])[2] == bytes([2]) * 16
        world.engine.revoke(serial)
        assert world.until(m.Done).evicted == evicted
