"""Real executors and a real store, driven by hand: wake, move, evict, write back, revoke, and hostile instances."""

import asyncio
import itertools
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import needs
import pytest

from dormouse.core.decisions.leases.gate import LATE_FRAMES
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

Instance: TypeAlias = Any  # conftest.py's classes; pytest's importlib mode does not make them importable
Kit: TypeAlias = Any

NUMEL = 1 << 20
NBYTES = 4 * NUMEL
_names = (f"i{number}" for number in itertools.count())


def floats(value: float, numel: int = NUMEL) -> bytes:
    return struct.pack("<f", value) * numel


@pytest.fixture
def make(kit: Kit) -> Any:
    """Makes instances that are forgotten after the test; afterwards the store is empty again."""
    made: list[Instance] = []

    def new() -> Instance:
        made.append(kit.instance(next(_names)))
        return made[-1]

    yield new
    for instance in made:
        kit.forget(instance)
    kit.run(store_empty(kit))


async def store_empty(kit: Kit) -> None:
    await kit.heard["store"].last(m.StoreStatus, lambda message: message.host_nbytes == 0)


Make = Callable[[], Instance]


@needs.COMPILER
def test_a_model_moves_between_gpus_and_answers_the_same(kit: Kit, make: Make) -> None:
    instance = make()

    async def scenario() -> None:
        version = await instance.upload({1: floats(1.0), 2: floats(2.0), 3: floats(3.0)})
        for turn in range(4):
            lease = kit.wake(instance, turn % 2, version)
            instance.define(lease, NUMEL)
            instance.send(lease, [1, 2, 10.0, 100 + turn])  # storage 100.. = storage 2 * 10
            assert await instance.download(lease, 100 + turn, NBYTES) == floats(20.0)
            assert await instance.end(lease, wait=False) is None
            done = await kit.done(lease)
            assert (done.outcome, done.version) == ("ended", version)
            assert done.copied_nbytes == (3 * NBYTES if turn < 2 else 0)
            assert dict(done.resident).get(instance.name, 3 * NBYTES) == 3 * NBYTES
            assert done.peak_activation_nbytes >= NBYTES
            if done.copied_nbytes:  # else there is nothing to say
                assert (await kit.awake(lease)).copied_nbytes == done.copied_nbytes

    kit.run(scenario())


def test_frames_ahead_of_their_wake_are_parked(kit: Kit, make: Make) -> None:
    instance = make()

    async def scenario() -> None:
        version = await instance.upload({1: floats(4.0)})
        lease = kit.lease(0)
        instance.define(lease, NUMEL)
        instance.send(lease, [wire.DOWNLOAD, 77, 1, 0, 0])
        await asyncio.sleep(0.05)
        kit.wake(instance, 0, version, lease=lease)
        assert await instance.answer(lease, 77) == NBYTES
        await instance.end(lease, wait=False)
        await kit.done(lease)

    kit.run(scenario())


def test_eviction_poisons_and_forgets_and_the_model_comes_back(kit: Kit, make: Make) -> None:
    first, second, third = make(), make(), make()

    async def scenario() -> None:
        versions = {}
        for value, instance in ((5.0, first), (6.0, second), (7.0, third)):
            versions[instance] = await instance.upload(
                {1: floats(value), 2: floats(-value), 3: floats(0.5), 4: floats(0.25)}
            )

        async def request(instance: Instance, value: float, worth: dict[str, float]) -> m.Done:
            lease = kit.wake(instance, 0, versions[instance], worth)
            instance.define(lease, NUMEL)
            assert await instance.download(lease, 1, NBYTES) == floats(value)
            assert await instance.download(lease, 2, NBYTES) == floats(-value)
            await instance.end(lease, wait=False)
            done: m.Done = await kit.done(lease)
            return done

        # 48 MiB hold three models of 16 MiB.
        for value, instance in ((5.0, first), (6.0, second), (7.0, third)):
            assert dict((await request(instance, value, {})).resident)[instance.name] == 4 * NBYTES
        assert (await request(first, 5.0, {})).copied_nbytes == 0

    kit.run(scenario())


@needs.COMPILER
def test_what_is_worth_least_goes_first(kit: Kit, make: Make) -> None:
    models, big = [make() for _ in range(4)], make()

    async def scenario() -> None:
        versions = {}
        for number, instance in enumerate(models):
            versions[instance] = await instance.upload({1: floats(float(number), 3 << 20)})  # 12 MiB

        async def request(number: int) -> m.Done:
            instance = models[number]
            lease = kit.wake(instance, 0, versions[instance])
            instance.define(lease, NUMEL)
            assert await instance.download(lease, 1, NBYTES) == floats(float(number))
            await instance.end(lease, wait=False)
            done: m.Done = await kit.done(lease)
            return done

        resident: dict[str, int] = {}
        for number in range(3):
            resident |= dict((await request(number)).resident)
        assert [resident[instance.name] for instance in models] == [12 << 20] * 3 + [0]
        lease = kit.wake(models[3], 0, versions[models[3]])
        await kit.awake(lease)
        token = 9
        models[3].define(lease, NUMEL)
        models[3].send(lease, [wire.CREATE, 50, 20 << 20, wire.SYNC, token])  # 20 MiB do not fit: the idle are evicted
        assert await models[3].answer(lease, token) is None
        pressed = await kit.heard["gpu0"].of(m.Pressed)
        gone = {instance.name: 0 for instance in models[:3]}
        assert dict(pressed.resident) == gone | {models[3].name: 12 << 20}
        assert pressed.stats.segments == 1
        await models[3].end(lease, wait=False)
        await kit.done(lease)
        for number in range(3):
            await request(number)
        version = await big.upload({1: floats(9.0, 3 << 20)})
        worth = {instance.name: 1.0 for instance in models} | {models[1].name: 0.5}
        lease = kit.wake(big, 0, version, worth)
        await big.end(lease, wait=False)
        assert dict((await kit.done(lease)).resident) == {big.name: 12 << 20, models[1].name: 0}

    kit.run(scenario())


def test_functions_share_equal_tensors_on_the_host_and_on_the_gpu(kit: Kit, make: Make) -> None:
    base, tune, same = make(), make(), make()

    async def scenario() -> None:
        shared = {1: floats(1.0), 2: floats(2.0)}
        versions = {base: await base.upload(shared), tune: await tune.upload({5: shared[1], 6: floats(6.0)})}
        versions[same] = await same.upload(shared)
        full = (3 * NBYTES, 3)
        await kit.heard["store"].last(m.StoreStatus, lambda status: (status.host_nbytes, status.segments) == full)
        copied = {}
        for instance, storage, value in ((base, 1, 1.0), (tune, 5, 1.0), (same, 2, 2.0)):
            lease = kit.wake(instance, 0, versions[instance])
            instance.define(lease, NUMEL)
            assert await instance.download(lease, storage, NBYTES) == floats(value)
            await instance.end(lease, wait=False)
            copied[instance] = (await kit.done(lease)).copied_nbytes
        assert [copied[base], copied[tune], copied[same]] == [2 * NBYTES, NBYTES, 0]
        # Each writes what it shares; nobody sees another's.
        for instance, storage, value in ((base, 1, 10.0), (tune, 5, 20.0)):
            lease = kit.wake(instance, 0, versions[instance])
            instance.define(lease, NUMEL)
            instance.send(lease, [0, storage, value])
            versions[instance] = await instance.end(lease, wait=True)
            await kit.done(lease)
        for gpu in (0, 1):
            for instance, storage, value in ((base, 1, 11.0), (tune, 5, 21.0), (same, 1, 1.0), (base, 2, 2.0)):
                lease = kit.wake(instance, gpu, versions[instance])
                instance.define(lease, NUMEL)
                assert await instance.download(lease, storage, NBYTES) == floats(value)
                await instance.end(lease, wait=False)
                await kit.done(lease)

    kit.run(scenario())


def test_write_back_reaches_the_other_gpu(kit: Kit, make: Make) -> None:
    instance = make()

    async def scenario() -> None:
        version = await instance.upload({1: floats(1.0), 2: floats(9.0)})
        other = kit.wake(instance, 1, version)
        await instance.end(other, wait=False)
        await kit.done(other)
        lease = kit.wake(instance, 0, version)
        instance.define(lease, NUMEL)
        instance.send(lease, [0, 1, 1.0, 1, 1, 2.0, 200])  # add 1 to storage 1; make storage 200 from it
        version = await instance.end(lease, wait=True)
        done = await kit.done(lease)
        assert (done.version, done.copied_nbytes) == (version, 2 * NBYTES)
        assert dict(done.resident) == {instance.name: 3 * NBYTES}
        lease = kit.wake(instance, 1, version)
        instance.define(lease, NUMEL)
        assert await instance.download(lease, 1, NBYTES) == floats(2.0)
        assert await instance.download(lease, 200, NBYTES) == floats(4.0)
        assert await instance.download(lease, 2, NBYTES) == floats(9.0)
        instance.send(lease, [0, 1, 1.0])
        version = await instance.end(lease, wait=True)
        assert (await kit.done(lease)).copied_nbytes == 2 * NBYTES
        lease = kit.wake(instance, 0, version)
        assert await instance.download(lease, 1, NBYTES) == floats(3.0)
        await instance.end(lease, wait=False)
        done = await kit.done(lease)
        assert done.copied_nbytes == NBYTES
        assert dict(done.resident)[instance.name] == 3 * NBYTES
        # Growth beyond the quota, counted from the first write-back, fails END; the model stays what it was.
        lease = kit.wake(instance, 0, version)
        instance.send(lease, [1, 1, 2.0, 300, 0, 1, 1.0])
        failed = await instance.end(lease, wait=True)
        assert failed[0] == wire.FAILED
        assert "quota" in failed[3]
        assert (await kit.done(lease)).outcome == "ended"
        lease = kit.wake(instance, 0, version)
        assert await instance.download(lease, 1, NBYTES) == floats(3.0)
        await instance.end(lease, wait=False)
        await kit.done(lease)

    kit.run(scenario())


def test_what_a_failed_request_wrote_is_forgotten(kit: Kit, make: Make) -> None:
    instance = make()

    async def scenario() -> None:
        version = await instance.upload({1: floats(1.0)})
        lease = kit.wake(instance, 0, version)
        instance.define(lease, NUMEL)
        instance.send(lease, [0, 1, 5.0, 1, 1, 1.0, 30])
        await instance.end(lease, wait=False)
        done = await kit.done(lease)
        assert (dict(done.resident), done.version) == ({instance.name: 0}, version)
        lease = kit.wake(instance, 0, version)
        assert await instance.download(lease, 1, NBYTES) == floats(1.0)
        instance.send(lease, [wire.DOWNLOAD, 5, 30, 0, 0])
        assert (await instance.answer(lease, 5))[0] == wire.FAILED
        instance.send(lease, [wire.FREE, 1, 1])
        await instance.end(lease, wait=False)
        done = await kit.done(lease)
        assert (done.version, done.stats.segments) == (version + 1, 0)

    kit.run(scenario())


def test_revoked_in_the_middle(kit: Kit, make: Make) -> None:
    instance = make()

    async def scenario() -> None:
        version = await instance.upload({1: floats(1.0)})
        lease = kit.wake(instance, 0, version)
        instance.define(lease, NUMEL)
        instance.send(lease, [0, 1, 5.0, wire.SYNC, 4])
        await instance.answer(lease, 4)
        kit.control["gpu0"].send(m.Revoke(serial=lease.serial))
        kit.control["gpu0"].send(m.Revoke(serial=lease.serial))
        assert (await kit.done(lease)).outcome == "revoked"
        instance.send(lease, [wire.SYNC, 6])
        assert (await instance.reply(lease, wire.REFUSED, lease.serial))[2]
        lease = kit.wake(instance, 0, version)
        assert await instance.download(lease, 1, NBYTES) == floats(1.0)
        await instance.end(lease, wait=False)
        assert (await kit.done(lease)).outcome == "ended"
        never = kit.wake(instance, 0, version + 100)  # a version that does not come: waits, and can be revoked
        kit.control["gpu0"].send(m.Revoke(serial=never.serial))
        assert (await kit.done(never)).outcome == "revoked"
        assert not [message for message in kit.heard["gpu0"].messages if isinstance(message, m.Done)]

    kit.run(scenario())


def test_a_model_larger_than_the_gpu_is_refused_with_the_numbers(kit: Kit, make: Make) -> None:
    instance = make()

    async def scenario() -> None:
        version = await instance.upload({1: bytes(50 << 20)})
        for _ in range(2):
            lease = kit.wake(instance, 0, version)
            instance.send(lease, [wire.UPLOAD_INLINE, 1, 50 << 20, 0, b"1234", wire.SYNC, 8])
            for token in (8, 9):
                failed = await instance.answer(lease, token)
                assert failed[2] == "OutOfMemoryError"
                assert "50.0 MiB" in failed[3]
                assert "48.0 MiB" in failed[3]
                if token == 8:  # and again, if the function goes on
                    instance.define(lease, 1)
                    instance.send(lease, [wire.DOWNLOAD, 9, 1, 0, -1])
            instance.send(lease, [wire.CREATE, 2, 1 << 10, wire.SYNC, 10])
            assert await instance.answer(lease, 10) is None
            await instance.end(lease, wait=False)
            assert (await kit.done(lease)).outcome == "ended"

    kit.run(scenario())


@needs.COMPILER
def test_activations_larger_than_what_is_left_are_out_of_memory(kit: Kit, make: Make) -> None:
    instance = make()

    async def scenario() -> None:
        version = await instance.upload({1: bytes(30 << 20)})
        lease = kit.wake(instance, 0, version)
        instance.send(lease, [wire.CREATE, 2, 10 << 20, wire.CREATE, 3, 10 << 20, wire.SYNC, 8])
        failed = await instance.answer(lease, 8)
        assert failed[2] == "OutOfMemoryError"
        assert "out of memory" in failed[3]
        instance.send(lease, [wire.CREATE, 4, 1 << 20, wire.SYNC, 9])
        assert await instance.answer(lease, 9) is None
        await instance.end(lease, wait=False)
        assert (await kit.done(lease)).outcome == "ended"

    kit.run(scenario())


def test_host_memory_is_bounded(kit: Kit, make: Make) -> None:
    instance = make()

    async def scenario() -> None:
        upload = m.StoreUpload(storage=1, total_nbytes=300 << 20, offset=0, arena_offset=0, nbytes=16)
        instance.store.send(upload)
        text = (await instance.heard.of(m.StoreFailed)).text
        assert "limits.host" in text
        assert await instance.upload({2: b"x" * 100}) == 1

    kit.run(scenario())


@pytest.mark.parametrize(
    "what", ["garbage", "parts", "unknown_command", "foreign_lease", "wrong_secret", "late_flood", "early_flood"]
)
def test_hostile_instances_hurt_only_themselves(kit: Kit, make: Make, what: str) -> None:
    hostile, victim = make(), make()

    async def scenario() -> None:
        version = await victim.upload({1: floats(1.0)})
        held = None
        lease = kit.wake(victim, 0, version)
        if what in ("garbage", "unknown_command", "wrong_secret"):
            await victim.end(lease, wait=False)
            await kit.done(lease)
            held = kit.wake(hostile, 0, 0)
        match what:
            case "garbage":
                assert held is not None
                hostile.send(held, [wire.SYNC, 1])
                await hostile.answer(held, 1)  # a lease that starts after the violation is ended by the controller
                hostile.links["gpu0"].send_raw(b"\x00garbage")
            case "parts":
                hostile.links["gpu0"]._outbox += b"\x01\x01a", b"\x00\x01b"  # the connection is there in a moment
                hostile.links["gpu0"]._drain()
            case "unknown_command":
                assert held is not None
                hostile.send(held, [-99, 1])
            case "foreign_lease":
                hostile.send(lease, [wire.SYNC, 1])
            case "wrong_secret":
                assert held is not None
                hostile.send(m.Lease(gpu=0, epoch=1, serial=held.serial, secret=1), [wire.SYNC, 1])
            case "late_flood":
                for _ in range(LATE_FRAMES + 1):
                    hostile.send(m.Lease(gpu=0, epoch=1, serial=0, secret=1), [wire.SYNC, 1])
            case "early_flood":
                for _ in range(wire.WINDOW_FRAMES + 1):
                    hostile.send(m.Lease(gpu=0, epoch=1, serial=10**6, secret=1), [wire.SYNC, 1])
        assert (await kit.violation(hostile, 0)).text
        if held is not None:
            assert (await kit.done(held)).outcome == "violated"
            lease = kit.wake(victim, 0, version)
        victim.define(lease, NUMEL)
        assert await victim.download(lease, 1, NBYTES) == floats(1.0)
        await victim.end(lease, wait=False)
        assert (await kit.done(lease)).outcome == "ended"

    kit.run(scenario())


def test_a_window_of_frames_may_be_on_the_way_and_no_more(kit: Kit, make: Make) -> None:
    instance = make()

    async def scenario() -> None:
        version = await instance.upload({1: floats(1.0)})
        lease = kit.wake(instance, 0, version)
        instance.define(lease, NUMEL)
        await instance.reply(lease, wire.ACK)
        slow = [0, 1, 1.0] * 200
        for _ in range(wire.WINDOW_FRAMES):
            instance.send(lease, slow)
        for _ in range(wire.WINDOW_FRAMES):
            await instance.reply(lease, wire.ACK)
        for _ in range(2 * wire.WINDOW_FRAMES):
            instance.send(lease, slow)
        assert "acknowledgement" in (await kit.violation(instance, 0)).text
        assert (await kit.done(lease)).outcome == "violated"

    kit.run(scenario())


def test_hostile_uploads(kit: Kit, make: Make) -> None:
    good = make()
    for upload in (
        m.StoreUpload(storage=1, total_nbytes=100, offset=0, arena_offset=8 << 20, nbytes=1),
        m.StoreUpload(storage=1, total_nbytes=100, offset=-1, arena_offset=0, nbytes=1),
        m.StoreUpload(storage=1, total_nbytes=100, offset=90, arena_offset=0, nbytes=11),
        m.StoreUpload(storage=1, total_nbytes=-5, offset=0, arena_offset=0, nbytes=0),
    ):
        hostile = make()

        async def scenario(hostile: Instance = hostile, upload: m.StoreUpload = upload) -> None:
            hostile.store.send(upload)
            assert (await hostile.heard.of(m.StoreFailed)).text

        kit.run(scenario())
    assert kit.run(good.upload({1: b"fine"})) == 1


def test_a_new_executor_learns_all_models(kit: Kit, make: Make) -> None:
    instance = make()

    async def scenario() -> None:
        version = await instance.upload({1: floats(3.5)})
        lease = kit.wake(instance, 1, version)
        await kit.awake(lease)
        await kit.kill("gpu1")
        await kit.restart("gpu1")
        lease = kit.wake(instance, 1, version)
        instance.define(lease, NUMEL)
        assert await instance.download(lease, 1, NBYTES) == floats(3.5)
        instance.send(lease, [0, 1, 1.0])
        version = await instance.end(lease, wait=True)
        assert (await kit.done(lease)).version == version
        lease = kit.wake(instance, 0, version)
        instance.define(lease, NUMEL)
        assert await instance.download(lease, 1, NBYTES) == floats(4.5)
        await instance.end(lease, wait=False)
        await kit.done(lease)

    kit.run(scenario())


def test_d13_the_last_instances_arena_is_unmapped(kit: Kit) -> None:
    """Also when a copy for it was the last thing that the executor's copy thread did."""
    instance = kit.instance(next(_names))
    inode = os.fstat(instance.arena.fd).st_ino

    def mapped() -> bool:
        """By the executor that it used; a memfd's inode is its own."""
        lines = Path(f"/proc/{kit.processes['gpu0'].pid}/maps").read_text().splitlines()
        return any(" /memfd:arena" in line and line.split()[4] == str(inode) for line in lines)

    async def use() -> None:
        version = await instance.upload({1: floats(1.0)})
        lease = kit.wake(instance, 0, version)
        instance.define(lease, NUMEL)
        instance.send(lease, [1, 1, 2.0, 100])
        assert await instance.download(lease, 100, NBYTES) == floats(2.0)
        await instance.end(lease, wait=False)
        assert (await kit.done(lease)).copied_nbytes == NBYTES

    kit.run(use())
    assert mapped()
    kit.forget(instance)
    end_s = time.monotonic() + 60
    while mapped():
        assert time.monotonic() < end_s
        kit.run(asyncio.sleep(0.01))
    kit.run(store_empty(kit))
