"""The engine on CudaDevice over the fake driver: its own tests, and wakes in which the driver refuses something.

The fake carries out no copy that nobody waits for, and kernels are the CPU's, so that a wait that is missing anywhere
between a wake and a command gives other bytes.
"""

import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
from cuda_child import cuda_server, in_child
from device_suite import content
from engine_suite import MIB, TOTALS, cases, engine_tests
from engine_world import AskPeer, LeavePeer, Reply
from fake_cuda.harness import Control

from dormouse.core.decisions.memory.transfer import Kind
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device.cuda import driver
from dormouse.gpuserver.device.cuda.device import CudaDevice
from dormouse.gpuserver.device.protocol import DeviceError, DeviceLost
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

__all__ = ["cuda_server"]

G = 2 * MIB  # a granule
META = [0, ["uint8", [16], [1], 0, 0], 1, ["uint8", [MIB], [1], 0, 0]]
ADD = [0, ["aten::add_.Scalar", [[wire.TENSOR, 1], [wire.SCALAR]], [], [[[wire.SAME, 0]], [], False], "float32"]]
WORDS = ("streams", "handles", "mappings", "reservations", "allocations", "registrations")


@contextmanager
def opened(
    control: Control, pool: str, nbytes: int = 0, poison: bool = True, late_s: float = 0, tests: Any = None
) -> Iterator[Any]:
    """A World of the engine's tests. Its slab has bytes n in the n-th MiB, where segment 10 + n begins; ``sizes`` has
    those that are not of 1 MiB. The copy thread waits for its copies only after ``late_s``: who uses bytes and has not
    waited for them finds others. Nothing is left of the world, and no rule of the driver's use was broken.
    """
    tests = tests or engine_tests()
    device = CudaDevice(
        0,
        memory_nbytes=(nbytes or TOTALS[pool]) + 16 * MIB,
        activation_nbytes=16 * MIB,
        pool=pool,
        poison=poison,
        chunk_nbytes=MIB,
    )
    device.attach_thread()
    retire = device._copies._retire

    def late() -> None:
        time.sleep(late_s)
        retire()

    device._copies._retire = late  # type: ignore[method-assign]
    world = tests.World(pool, device=device)
    for number in range(16):
        world.slab.view[number * MIB : (number + 1) * MIB] = bytes([number]) * MIB
    world.sizes, world.told = {}, set()
    world.answer = lambda fetch: answer(world, fetch, *fetch.segments, last=True)
    yield world
    for name in list(world.compute._instances):
        world.engine.forget(name)
    tests.close(world)
    assert control.violations() == []
    assert {word: control.live(word) for word in WORDS} == dict.fromkeys(WORDS, 0)


def attach(world: Any, name: str) -> None:
    """Beside "a" and "b", of another tenant."""
    arena = m.Arena(request_nbytes=0, response_nbytes=0, stream_nbytes=4096)
    told = m.AttachInstance(
        instance=name,
        tenant=f"tenant of {name}",
        function=name,
        function_version=1,
        directory="",
        uid=0,
        arena=arena,
        quota_nbytes=0,
    )
    world.heard(world.leases.attach, told, SharedMemory.create("arena", arena.nbytes))
    world.run()


def deploy(world: Any, instance: str, *segments: int) -> None:
    """Storage n is the whole of the n-th segment."""
    sizes = [(segment, world.sizes.get(segment, MIB)) for segment in segments]
    entries = [m.Entry(storage=n, segment=s, offset=0, nbytes=nbytes) for n, (s, nbytes) in enumerate(sizes)]
    world.engine.manifest(m.Manifest(instance=instance, version=1, entries=entries, segments=sizes))


def metas(world: Any, instance: str = "a") -> Any:
    """What its interpreter must know, once."""
    if instance in world.told:
        return ()
    world.told.add(instance)
    return META


def answer(world: Any, fetch: m.Fetch, *segments: int, last: bool) -> None:
    places = [m.Place(segment=s, slab=0, offset=(s - 10) * MIB, nbytes=world.sizes.get(s, MIB)) for s in segments]
    world.post(world.wakes.fetched, m.Fetched(ticket=fetch.ticket, places=places, file_nbytes=0, last=last))


def run(world: Any, serial: int, instance: str, *segments: int, **how: Any) -> m.Done:
    """A whole lease that reads all of a model."""
    world.wake(serial, instance, **how)
    return finish(world, serial, instance, *segments)


def finish(world: Any, serial: int, instance: str, *segments: int) -> m.Done:
    for storage, segment in enumerate(segments):
        read = world.read(serial, storage + 1, storage, name=instance, metas=metas(world, instance))
        assert read == bytes([segment - 10]) * 16, (serial, segment)
    world.frame(serial, len(segments) + 1, wire.END, 8, 0, name=instance)
    done: m.Done = world.until(m.Done)
    assert done.outcome == "ended"
    intact(world)
    return done


def intact(world: Any) -> None:
    """All that the books have is there, to the byte."""
    world.engine.residency.check()
    world.device.synchronize()
    pool = world.engine.residency.pool
    for segment in pool.segments():
        at, nbytes = (segment - 10) * MIB, pool.nbytes(segment)
        assert content(world.device, pool.offset(segment), nbytes) == bytes(world.slab.view[at : at + nbytes]), segment


def refused(world: Any, serial: int, name: str = "a") -> str:
    """Why the wake that has just begun will not be."""
    world.frame(serial, 1, wire.DOWNLOAD, 7, 0, 0, -1, metas=metas(world, name), name=name)
    kind, _, error, text, _ = msgpack.unpackb(world.until(Reply).messages[0])
    assert (kind, error) == (wire.FAILED, "OutOfMemoryError")
    world.frame(serial, 2, wire.END, 8, 0, name=name)
    assert world.until(m.Done).outcome == "ended"
    return str(text)


def failed(world: Any, serial: int, number: int, storage: int) -> str:
    """What a command that needs this storage says."""
    world.frame(serial, number, wire.DOWNLOAD, 7, storage, 0, -1, metas=metas(world))
    kind, _, _, text, _ = msgpack.unpackb(world.until(Reply).messages[0])
    assert kind == wire.FAILED
    return str(text)


# --- its own tests


def all_of_them(control: Control, pool: str) -> None:
    tests = engine_tests()
    for _, test, rest in cases(tests, pool):
        with opened(control, pool, late_s=0.002, tests=tests) as world:
            test(world, *rest)


@in_child()
def test_the_engines_tests_in_regions(control: Control) -> None:
    all_of_them(control, "regions")


@in_child()
def test_the_engines_tests_in_pages(control: Control) -> None:
    all_of_them(control, "pages")


@in_child()
def test_the_engines_tests_in_buddy_blocks(control: Control) -> None:
    all_of_them(control, "buddy")


# --- order


@in_child()
def test_commands_use_what_has_come_while_the_rest_is_on_its_way(control: Control) -> None:
    for pool in TOTALS:
        with opened(control, pool, late_s=0.02) as world:
            deploy(world, "a", 10, 11, 12, 13)
            world.answering = False
            world.wake(1)
            fetch = world.until(m.Fetch)
            answer(world, fetch, 10, 11, last=False)
            assert world.read(1, 1, 1, metas=metas(world)) == bytes([1]) * 16
            assert not any(isinstance(effect, m.Awake) for effect in world.seen)
            world.io.submit(answer, world, fetch, 13, last=False)
            assert world.read(1, 2, 3) == bytes([3]) * 16
            world.io.submit(answer, world, fetch, 12, last=True)
            assert world.read(1, 3, 2) == bytes([2]) * 16
            world.frame(1, 4, wire.END, 8, 0)
            assert world.until(m.Done).copied_nbytes == 4 * MIB
            intact(world)


@in_child()
def test_a_short_lease_ends_when_all_has_come(control: Control) -> None:
    with opened(control, "regions", late_s=0.02) as world:
        deploy(world, "a", 10, 11, 12, 13)
        done = run(world, 1, "a")
        assert (done.copied_nbytes, done.resident) == (4 * MIB, [("a", 4 * MIB)])
        assert run(world, 2, "a", 10, 11, 12, 13).copied_nbytes == 0


@in_child()
def test_cancelled_in_the_middle_nothing_is_under_way_and_what_came_is_kept(control: Control) -> None:
    for pool in TOTALS:
        with opened(control, pool, late_s=0.005) as world:
            deploy(world, "a", 10, 11, 12, 13)
            stream, count, third = world.device._copies, itertools.count(1), threading.Event()
            issue = stream._issue

            def slow(job: Any, step: Any, count: Any = count, third: Any = third, issue: Any = issue) -> None:
                if next(count) == 3:
                    third.set()
                    while not job.cancelled:
                        time.sleep(0.001)
                issue(job, step)

            stream._issue = slow
            world.wake(1)
            world.read(1, 1, 0, metas=metas(world))
            third.wait()
            world.engine.revoke(1)
            stream._issue = issue
            assert control.pending(stream._stream) == 0
            done = world.until(m.Done)
            assert done.copied_nbytes == 3 * MIB  # the third was about to begin
            assert done.resident == [("a", 3 * MIB)]
            intact(world)
            pin = m.PeerPin(gpu=1, epoch=1, ticket=1, segments=[10, 11, 12, 13])
            assert len(world.lending.pin(pin)) == 3  # others may have it
            world.lending.unpin(m.PeerUnpin(gpu=1, epoch=1, ticket=1))
            assert run(world, 2, "a", 10, 11, 12, 13).copied_nbytes == MIB


@in_child()
def test_what_comes_waits_for_the_kernels_of_what_was_there(control: Control) -> None:
    for pool in ("regions", "pages"):
        with opened(control, pool, 8 * MIB, poison=False) as world:
            world.sizes = {10: 4 * MIB, 14: 4 * MIB, 18: 4 * MIB}
            deploy(world, "a", 10, 14)
            deploy(world, "b", 18)
            run(world, 1, "a", 10, 14)
            device, books = world.device, world.engine.residency.pool
            sums = [
                control.kernel_sum(device._compute, device.storage(books.offset(each), 1).data_ptr(), 4 * MIB)
                for each in (10, 14)
            ]
            run(world, 2, "b", 18)
            device.synchronize()
            assert [each.value for each in sums] == [MIB * (0 + 1 + 2 + 3), MIB * (4 + 5 + 6 + 7)], pool


@in_child()
def test_what_comes_is_not_cleared_or_poisoned_afterwards(control: Control) -> None:
    """With kernels that wait for nothing, as a GPU's do: only the event that they are given orders the copies."""
    for pool in ("regions", "pages"):
        with opened(control, pool, 8 * MIB) as world:
            attach(world, "c")
            world.sizes = {10: 4 * MIB, 14: 4 * MIB, 18: 4 * MIB}
            deploy(world, "a", 10, 14)
            deploy(world, "c", 18)
            run(world, 1, "a", 10, 14)
            world.device._adapter.follow = lambda: None
            world.wake(2, "c")
            world.until(m.Awake)
            assert control.pending(world.device._compute) == 0  # the copies came after all of it
            world.engine.revoke(2)
            world.until(m.Done)
            intact(world)
            del world.device._adapter.follow


@in_child()
def test_segments_move_before_anybody_reads_them(control: Control) -> None:
    with opened(control, "regions", late_s=0.005) as world:
        given = scattered(world)
        pending: list[int] = []
        arrived = world.engine.residency.arrived

        def noticed(segment: int) -> None:
            if segment < 20:
                pending.append(control.pending(world.device._copies._stream))
            arrived(segment)

        world.engine.residency.arrived = noticed
        done = run(world, 2, "b", 20, worth={"a": 1e9})
        assert done.copied_nbytes == 2 * MIB
        assert world.engine.residency.moved_nbytes > 0
        assert len(given) == 1
        assert given[0] == 4 - len(pending)  # while they move, others are not told where they are
        assert set(pending) == {0}
        pin = m.PeerPin(gpu=1, epoch=1, ticket=1, segments=[10, 12, 13, 15])
        assert len(world.lending.pin(pin)) == 4
        world.lending.unpin(m.PeerUnpin(gpu=1, epoch=1, ticket=1))
        assert run(world, 3, "a", 10, 12, 13, 15).copied_nbytes == 0


def scattered(world: Any) -> list[int]:
    """ "a" has four of six places, and what "b" needs fits only if some of it moves. Returns what other GPUs are given
    of it at that moment, in a list that is filled then.
    """
    attach(world, "c")
    world.sizes = {20: 2 * MIB}
    deploy(world, "c", 10, 11, 12, 13, 14, 15)
    deploy(world, "a", 10, 12, 13, 15)
    deploy(world, "b", 20)
    run(world, 1, "c", 10, 11, 12, 13, 14, 15)
    world.engine.forget("c")
    given: list[int] = []
    copy_in = world.device.copy_in

    def looking(what: Any, *rest: Any) -> Any:
        if what[0].origin.kind is Kind.POOL:
            found = world.heard(world.engine.residency.pin, [10, 12, 13, 15])
            given.append(len(found))
            world.heard(world.engine.residency.let_go, [segment for segment, _ in found])
        return copy_in(what, *rest)

    world.device.copy_in = looking
    return given


@in_child()
def test_what_was_computed_is_given_to_others_when_it_is_there(control: Control) -> None:
    with opened(control, "regions") as world:
        deploy(world, "a", 10)
        deploy(world, "b", 10)
        world.wake(1)
        world.frame(1, 1, 0, 0, 7, wire.END, 8, 1, metas=metas(world), keys=ADD)
        ask = world.until(m.AskPlace)
        place = m.Place(segment=17, slab=0, offset=7 * MIB, nbytes=MIB)
        world.engine.placed(m.Placed(ticket=ask.ticket, places=[place]))
        given: list[Any] = []
        synchronize = world.device.synchronize

        def looking() -> None:
            synchronize()
            given.append(world.heard(world.engine.residency.pin, [17]))

        world.device.synchronize = looking
        entry = m.Entry(storage=0, segment=17, offset=0, nbytes=MIB)
        world.engine.manifest(m.Manifest(instance="a", version=2, entries=[entry], segments=[(17, MIB)]))
        del world.device.synchronize
        assert given == [[], []]  # before the copy, and after it, when nobody has been told yet
        assert len(world.engine.residency.pin([17])) == 1
        world.engine.residency.let_go([17])
        world.until(m.Done)
        intact(world)


# --- refusals


@in_child()
def test_no_memory_in_the_middle_of_a_wake(control: Control) -> None:
    """Whichever call it is: that wake fails and says why, the others' segments stay, and it can be tried again."""
    for function, nth in (("cuMemMap", 1), ("cuMemMap", 3), ("cuMemSetAccess", 1)):
        with opened(control, "pages", 12 * MIB) as world:
            world.sizes = dict.fromkeys((10, 12, 14, 16, 18, 20, 22), G)
            deploy(world, "a", 16, 18, 20, 22)
            deploy(world, "b", 10, 12, 14)
            run(world, 1, "b", 10, 12, 14)
            control.fail(function, nth, driver.OUT_OF_MEMORY)
            world.wake(2)
            text = refused(world, 2)
            assert text.startswith("the GPU refused memory for the model: cannot map "), text
            assert f"{function}: CUDA_ERROR_OUT_OF_MEMORY (2)" in text
            intact(world)
            assert world.engine.residency.resident_nbytes("a") == 0
            assert world.engine.residency.resident_nbytes("b") == 2 * G  # one had to go for what did not come
            assert run(world, 3, "b", 10, 12, 14).copied_nbytes == G
            assert run(world, 4, "a", 16, 18, 20, 22).copied_nbytes == 4 * G


@in_child()
def test_what_was_to_be_cleared_is_cleared_when_it_is_tried_again(control: Control) -> None:
    with opened(control, "pages", 8 * MIB) as world:
        attach(world, "c")
        world.sizes = {18: 8 * MIB}
        deploy(world, "a", 18)
        deploy(world, "c", 10)
        run(world, 1, "a", 18)
        for function in ("cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"):
            control.fail(function, 1, driver.OUT_OF_MEMORY)
            world.wake(2, "c")
            assert function in refused(world, 2, "c")
        assert run(world, 3, "c", 10).copied_nbytes == MIB
        offset = world.engine.residency.pool.offset(10)
        assert content(world.device, offset + MIB, MIB) == bytes(MIB)  # the rest of its granule


@in_child()
def test_a_move_that_is_refused_leaves_nothing_wrong(control: Control) -> None:
    with opened(control, "regions") as world:
        scattered(world)
        control.fail("cuEventRecord", 1, driver.OUT_OF_MEMORY)
        world.wake(2, "b", worth={"a": 1e9})
        assert "cuEventRecord" in refused(world, 2, "b")
        intact(world)
        assert 0 < world.engine.residency.resident_nbytes("a") < 4 * MIB
        done = run(world, 3, "a", 10, 12, 13, 15)
        assert 0 < done.copied_nbytes < 4 * MIB
        assert run(world, 4, "b", 20).copied_nbytes == 2 * MIB


@in_child()
def test_a_copy_that_cannot_begin_fails_its_commands_only(control: Control) -> None:
    with opened(control, "regions") as world:
        deploy(world, "a", 10, 11)
        world.answering = False
        world.wake(1)
        fetch = world.until(m.Fetch)
        answer(world, fetch, 10, last=False)
        place = m.Place(segment=11, slab=5, offset=MIB, nbytes=MIB)
        world.heard(world.wakes.fetched, m.Fetched(ticket=fetch.ticket, places=[place], file_nbytes=0, last=True))
        assert "the memory of host 5 is not mapped" in failed(world, 1, 1, 1)
        assert world.read(1, 2, 0) == bytes(16)
        world.engine.revoke(1)
        assert world.until(m.Done).copied_nbytes == MIB
        world.answering = True
        assert run(world, 2, "a", 10, 11).copied_nbytes == MIB


# --- other GPUs


def peer_of_itself(world: Any) -> None:
    """The pool, read as if it were another executor's: granules can be imported where they were made."""
    handle, descriptors = world.device.export()
    try:
        world.device.map_peer(1, world.device.pool_nbytes, handle, descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@in_child()
def test_what_a_peer_has_comes_from_there(control: Control) -> None:
    with opened(control, "pages") as world:
        world.device.map_host(1, SharedMemory.create("slab", 16 * MIB))
        world.sizes = {10: 3 * MIB}
        deploy(world, "a", 10, 13)
        run(world, 1, "a", 10, 13)
        rates = world.device._copies.rates
        rates._rates[Kind.SLAB] = 1e12  # faster than any link: a peer is tried first nevertheless
        assert world.device.bandwidth(Kind.PEER) == 0
        peer_of_itself(world)
        assert world.device.bandwidth(Kind.PEER) > 1e12
        world.sizes[20] = 3 * MIB
        deploy(world, "b", 20, 23)
        found = dict(world.lending.pin(m.PeerPin(gpu=2, epoch=1, ticket=9, segments=[10, 13])))
        world.wake(2, "b", peers=[1])
        ask = world.until(AskPeer)
        assert ask.segments == [20, 23]
        pinned = m.PeerPinned(gpu=1, epoch=1, ticket=ask.ticket, extents=[(20, found[10])])
        world.heard(world.wakes.peer_answered, pinned.ticket, pinned.extents)
        assert world.until(m.Fetch).segments == [23]
        assert world.read(2, 1, 0, name="b", metas=metas(world, "b")) == bytes(16)
        world.frame(2, 2, wire.END, 8, 0, name="b")
        done = world.until(m.Done)
        assert (done.copied_nbytes, done.peer_nbytes) == (4 * MIB, 3 * MIB)
        assert LeavePeer(1, ask.ticket) in world.seen
        offset = world.engine.residency.pool.offset(20)
        assert content(world.device, offset, 3 * MIB) == bytes(world.slab.view[: 3 * MIB])
        world.lending.unpin(m.PeerUnpin(gpu=2, epoch=1, ticket=9))


@in_child()
def test_a_peer_that_cannot_be_copied_from_is_not_asked(control: Control) -> None:
    with opened(control, "pages") as world:
        deploy(world, "a", 10, 11)
        for function in ("cuMemImportFromShareableHandle", "cuMemSetAccess", "cuMemcpyDtoDAsync"):
            control.fail(function, 0, driver.PEER_ACCESS_UNSUPPORTED)
            with pytest.raises(DeviceError, match=function):
                peer_of_itself(world)
            control.fail(function, 0, 0)
        assert world.device.bandwidth(Kind.PEER) == 0
        done = run(world, 1, "a", 10, 11, peers=[1])
        assert (done.copied_nbytes, done.peer_nbytes) == (2 * MIB, 0)


@in_child()
def test_a_fault_that_shows_late_shows_in_the_lease_that_caused_it(control: Control) -> None:
    """A kernel fails on the GPU when its request has had all its answers: nobody else may be blamed."""
    tests = engine_tests()
    device = CudaDevice(0, memory_nbytes=22 * MIB, activation_nbytes=16 * MIB, chunk_nbytes=MIB)
    device.attach_thread()
    world = tests.World(device=device)
    world.told = set()
    world.engine.manifest(tests.MODEL)
    world.wake(1)
    world.until(m.Awake)
    assert world.read(1, 1, 0, metas=metas(world)) == bytes(16)
    control.fail("cuStreamSynchronize", 1, 710, sticky=True)
    with pytest.raises(DeviceLost, match="710"):
        world.frame(1, 2, wire.END, 8, 0)
    world.heard(lambda: None)  # all has been said
    told = [world.effects.get() for _ in range(world.effects.qsize())]
    assert not [effect for effect in told if isinstance(effect, m.Done)], told


@in_child()
def test_a_lost_gpu_answers_nothing(control: Control) -> None:
    tests = engine_tests()
    device = CudaDevice(0, memory_nbytes=22 * MIB, activation_nbytes=16 * MIB, chunk_nbytes=MIB)
    device.attach_thread()
    lost: list[DeviceLost] = []
    device.on_lost = lost.append
    world = tests.World(device=device)
    world.told = set()
    world.engine.manifest(tests.MODEL)
    control.fail("copy", 2, 700, sticky=True)
    world.wake(1)

    def use() -> None:
        for storage in range(4):
            assert world.read(1, storage + 1, storage, metas=metas(world)) == bytes([storage]) * 16

    with pytest.raises(DeviceLost, match="700"):
        use()
    for call in (lambda: world.engine.revoke(1), device.synchronize, device.record):
        with pytest.raises(DeviceLost):
            call()
    world.device._copies._thread.join()
    assert len(lost) == 1
