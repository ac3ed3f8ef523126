"""The device thread's half: computation before the copy has ended, sharing and copy on write, revocation in the middle,
exactly one Done; over every strategy of pool.
"""

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import torch
from engine_world import ADD, META, MIB, MODEL, AskPeer, LeavePeer, Reply, Violated, World, close, manifest

from dormouse.core.decisions.leases import events as e
from dormouse.core.links.fds import close_all
from dormouse.core.quantities import size
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.commands.interpreter import Interpreter
from dormouse.gpuserver.device.host.copies import HostCopyJob
from dormouse.gpuserver.device.host.device import HostDevice
from dormouse.gpuserver.device.host.memory import PeerMemory
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire


@pytest.fixture(params=["regions", "pages", "buddy"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    total = {"regions": 6 * MIB, "pages": 6 * MIB, "buddy": 128 * MIB}[request.param]
    world = World(request.param, total)
    yield world
    close(world)


@pytest.fixture
def small() -> Iterator[World]:
    world = World()
    yield world
    close(world)


def test_the_first_segments_are_used_while_the_last_are_on_their_way(world: World) -> None:
    world.engine.manifest(MODEL)
    world.link.hold(after_nbytes=2 * MIB)
    world.wake(1)
    assert world.read(1, 1, 1, metas=META) == bytes([1]) * 16
    assert not any(isinstance(effect, m.Awake) for effect in world.seen)
    world.link.release()
    world.frame(1, 2, wire.END, 8, 0)
    done = world.until(m.Done)
    assert any(isinstance(effect, m.Awake) for effect in world.seen)
    assert any(isinstance(effect, m.LetGo) for effect in world.seen)
    assert (done.outcome, done.copied_nbytes, done.resident) == ("ended", 4 * MIB, [("a", 4 * MIB)])
    assert done.stats.weights_nbytes == 4 * MIB
    assert done.stats.segments == 4
    world.wake(2)
    assert world.read(2, 1, 3) == bytes([3]) * 16
    world.frame(2, 2, wire.END, 8, 0)
    assert world.until(m.Done).copied_nbytes == 0


def test_revoked_while_copying(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cancel = HostCopyJob.cancel

    def cancelled(job: HostCopyJob) -> None:
        cancel(job)
        world.link.release()

    monkeypatch.setattr(HostCopyJob, "cancel", cancelled)
    world.engine.manifest(MODEL)
    world.link.hold(after_nbytes=MIB)
    world.wake(1)
    world.read(1, 1, 0, metas=META)
    world.engine.revoke(1)
    world.engine.revoke(1)
    done = world.until(m.Done)
    assert done.outcome == "revoked"
    assert MIB <= done.copied_nbytes < 4 * MIB
    assert done.resident == [("a", done.copied_nbytes)]
    assert not any(isinstance(effect, m.Awake) for effect in world.seen)
    assert world.nothing_more()
    world.wake(2)
    assert world.read(2, 1, 3) == bytes([3]) * 16
    assert world.read(2, 2, 0) == bytes([0]) * 16
    world.engine.revoke(2)
    assert world.until(m.Done).copied_nbytes == 4 * MIB - done.copied_nbytes


def test_revoked_before_the_store_has_answered(small: World) -> None:
    small.answering = False
    small.engine.manifest(MODEL)
    small.wake(1)
    fetch = small.until(m.Fetch)
    assert fetch.segments == [10, 11, 12, 13]
    small.engine.revoke(1)
    done = small.until(m.Done)
    assert (done.outcome, done.copied_nbytes, done.resident) == ("revoked", 0, [("a", 0)])
    assert small.seen[-1] == m.LetGo(ticket=fetch.ticket)
    small.heard(small.answer, fetch)  # too late
    assert small.nothing_more()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_wake_that_fails_says_why_and_the_next_one_works(small: World, damaged: bool) -> None:
    small.answering = False
    small.engine.manifest(MODEL)
    small.wake(1)
    fetch = small.until(m.Fetch)
    place = m.Place(segment=10, slab=0, offset=0, nbytes=MIB)
    small.heard(small.wakes.fetched, m.Fetched(ticket=fetch.ticket, places=[place], file_nbytes=MIB, last=False))
    small.heard(small.wakes.fetch_failed, m.FetchFailed(ticket=fetch.ticket, text="a damaged file", damaged=damaged))
    assert small.read(1, 1, 0, metas=META) == bytes(16)
    small.frame(1, 2, wire.DOWNLOAD, 7, 2, 0, -1)
    kind, token, name, text, _ = msgpack.unpackb(small.until(Reply).messages[0])
    assert (kind, token, name) == (wire.FAILED, 7, "ModelDamaged" if damaged else "WakeFailed")
    assert "a damaged file" in text
    small.engine.revoke(1)
    done = small.until(m.Done)
    assert (done.copied_nbytes, done.file_nbytes, done.resident) == (MIB, MIB, [("a", MIB)])
    small.answering = True
    small.wake(2)
    assert small.read(2, 1, 2) == bytes([2]) * 16
    small.engine.revoke(2)


def test_what_the_host_keeps_for_a_wake_is_bounded(small: World) -> None:
    small.wakes._batch_nbytes = MIB
    small.answering = False
    small.engine.manifest(MODEL)
    small.wake(1)
    asked: list[m.Fetch] = []
    open_, most = 0, 0
    while len(asked) < 4 or open_:
        effect = small.effects.get(timeout=60)
        if isinstance(effect, m.Fetch):
            assert len(effect.segments) == 1
            asked.append(effect)
            open_ += 1
            most = max(most, open_)
            small.io.submit(small.answer, effect)
        open_ -= isinstance(effect, m.LetGo)
    assert most == 2
    assert [fetch.segments[0] for fetch in asked] == [10, 11, 12, 13]
    assert small.read(1, 1, 3, metas=META) == bytes([3]) * 16
    small.engine.revoke(1)


def test_frames_that_a_revocation_has_overtaken_are_not_run(small: World) -> None:
    small.wake(1)
    frame = msgpack.packb([1, 5, 1, [[], []], [wire.SYNC, 3]])
    small.heard(small.hear, e.Heard("a", frame))  # the compute thread is not at it yet
    small.engine.revoke(1)
    done = small.until(m.Done)
    assert done.outcome == "revoked"
    replies = [message for effect in small.seen if isinstance(effect, Reply) for message in effect.messages]
    assert [msgpack.unpackb(reply)[:2] for reply in replies] == [[wire.REFUSED, 1]]


def test_a_wrong_frame_ends_the_lease_once(small: World) -> None:
    small.wake(1)
    small.frame(1, 1, -77)
    small.frame(1, 2, wire.SYNC, 3)
    assert small.until(Violated).instance == "a"
    assert small.until(m.Done).outcome == "violated"
    assert small.nothing_more()


def test_an_instance_that_goes_in_its_lease(world: World) -> None:
    world.engine.manifest(MODEL)
    world.wake(1)
    world.engine.forget("a")
    assert world.until(m.Done).outcome == "revoked"
    assert world.engine.residency.occupied_nbytes == 0
    world.engine.dropped("a")


def test_a_newer_manifest_waits_for_the_lease_and_drops_what_is_stale(world: World) -> None:
    world.engine.manifest(manifest("a", 10, 11))
    world.wake(1)
    newer = m.Manifest(
        instance="a",
        version=2,
        entries=[
            m.Entry(storage=1, segment=11, offset=0, nbytes=MIB),
            m.Entry(storage=5, segment=12, offset=0, nbytes=MIB),
        ],
        segments=[(11, MIB), (12, MIB)],
    )
    world.engine.manifest(newer)
    assert world.read(1, 1, 0, metas=META) == bytes(16)
    world.frame(1, 2, wire.END, 8, 0)
    done = world.until(m.Done)
    assert (done.version, done.copied_nbytes) == (2, 2 * MIB)
    assert world.engine.residency.resident_nbytes("a") == MIB
    assert 10 not in world.engine.residency.pool


def test_eviction_takes_the_storages_out_of_reach(small: World) -> None:
    small.engine.manifest(MODEL)
    small.engine.manifest(manifest("b", 20, 21, 22))
    for serial, instance in ((1, "a"), (2, "b"), (3, "a")):
        small.answering = instance == "a"
        small.wake(serial, instance)
        if instance == "a":
            small.until(m.Awake)
            assert small.read(serial, 1, 2, metas=META if serial == 1 else ()) == bytes([2]) * 16
        small.engine.revoke(serial)
        done = small.until(m.Done)
    assert done.copied_nbytes == MIB  # of four segments one had to go for b's three, as the pool holds six
    assert dict(done.resident)["a"] == 4 * MIB


def test_functions_share_what_is_equal_and_a_write_copies_first(world: World) -> None:
    world.engine.manifest(MODEL)
    world.engine.manifest(manifest("b", 10, 11))
    world.wake(1, "b")
    assert world.read(1, 1, 1, name="b", metas=META) == bytes([1]) * 16
    world.frame(1, 2, 0, 1, 5, keys=ADD, name="b")
    assert world.read(1, 3, 1, name="b") == bytes([6]) * 16
    world.frame(1, 4, wire.END, 8, 1, name="b")
    ask = world.until(m.AskPlace)
    assert ask.storages == [(1, MIB)]
    place = m.Place(segment=30, slab=0, offset=8 * MIB, nbytes=MIB)
    world.engine.placed(m.Placed(ticket=ask.ticket, places=[place]))
    world.until(m.Written)
    assert world.slab.view[8 * MIB : 9 * MIB] == bytes([6]) * MIB
    world.engine.manifest(manifest("b", 10, 30, version=2))
    done = world.until(m.Done)
    assert (done.version, dict(done.resident)) == (2, {"a": 2 * MIB, "b": 2 * MIB})
    world.wake(2, "a")
    assert world.read(2, 1, 1, metas=META) == bytes([1]) * 16
    world.frame(2, 2, wire.END, 8, 0)
    assert world.until(m.Done).copied_nbytes == 2 * MIB  # 10 and 11 were there
    world.wake(3, "b")
    assert world.read(3, 1, 1, name="b") == bytes([6]) * 16
    world.engine.revoke(3)
    assert world.until(m.Done).copied_nbytes == 0


def test_a_new_instance_whose_model_is_here_is_told_of_at_once(world: World) -> None:
    world.engine.manifest(MODEL)
    world.wake(1)
    world.engine.manifest(manifest("b", 10, 14))
    assert world.until(m.Pressed).resident == [("a", 4 * MIB), ("b", MIB)]
    world.engine.manifest(manifest("b", 10, 14))
    world.engine.revoke(1)
    world.until(m.Done)
    assert not any(isinstance(effect, m.Pressed) for effect in world.seen)  # nothing new


def test_what_nobody_shares_is_written_in_place(world: World) -> None:
    world.engine.manifest(manifest("a", 10, 11))
    world.wake(1)
    world.frame(1, 1, 0, 1, 7, wire.END, 8, 1, metas=META, keys=ADD)
    ask = world.until(m.AskPlace)
    if not any(isinstance(effect, m.Awake) for effect in world.seen):
        world.until(m.Awake)
    before = world.engine.residency.pool.offset(-1)  # what is written there is segment 11 no more
    assert world.lending.pin(m.PeerPin(gpu=1, epoch=1, ticket=1, segments=[10, 11]))[0][0] == 10
    assert 11 not in dict(world.lending.pin(m.PeerPin(gpu=1, epoch=1, ticket=2, segments=[11])))
    world.lending.unpin(m.PeerUnpin(gpu=1, epoch=1, ticket=1))
    place = m.Place(segment=31, slab=0, offset=9 * MIB, nbytes=MIB)
    world.engine.placed(m.Placed(ticket=ask.ticket, places=[place]))
    world.engine.manifest(manifest("a", 10, 31, version=2))
    done = world.until(m.Done)
    assert (done.version, done.wrote) == (2, True)
    assert world.engine.residency.pool.offset(31) == before
    assert 11 not in world.engine.residency.pool
    world.wake(2)
    assert world.read(2, 1, 1) == bytes([8]) * 16
    world.engine.revoke(2)
    assert world.until(m.Done).copied_nbytes == 0


def test_a_write_that_the_store_does_not_take_is_none(world: World) -> None:
    world.engine.manifest(manifest("a", 10, 11))
    world.wake(1)
    world.frame(1, 1, 0, 1, 7, wire.END, 8, 1, metas=META, keys=ADD)
    ask = world.until(m.AskPlace)
    world.engine.place_refused(m.PlaceRefused(ticket=ask.ticket, text="full"))
    done = world.until(m.Done)
    assert (done.outcome, done.wrote) == ("ended", False)


@pytest.mark.parametrize("shared", [False, True])
def test_a_revoked_write_is_not_seen_again(world: World, shared: bool) -> None:
    world.engine.manifest(manifest("a", 10, 11))
    if shared:
        world.engine.manifest(manifest("b", 11))
    world.wake(1)
    world.frame(1, 1, 0, 1, 7, metas=META, keys=ADD)
    assert world.read(1, 2, 1) == bytes([8]) * 16
    world.engine.revoke(1)
    assert not world.until(m.Done).wrote
    assert (11 in world.engine.residency.pool) == shared  # a copy was written, and the segment is as it was
    world.wake(2)
    assert world.read(2, 1, 1) == bytes([1]) * 16
    world.engine.revoke(2)


def test_equal_tensors_of_one_function_are_one_segment_until_one_is_written(world: World) -> None:
    world.engine.manifest(manifest("a", 11, 11, 12))
    world.wake(1)
    world.frame(1, 1, 0, 0, 1, metas=META, keys=ADD)
    assert world.read(1, 2, 0) == bytes([2]) * 16
    assert world.read(1, 3, 1) == bytes([1]) * 16
    world.engine.revoke(1)
    assert world.until(m.Done).copied_nbytes == 2 * MIB


def test_what_is_left_of_a_pack_is_not_written_in_place(world: World) -> None:
    rest = m.Entry(storage=1, segment=11, offset=MIB // 2, nbytes=MIB // 2)
    whole = m.Entry(storage=0, segment=10, offset=0, nbytes=MIB)
    world.engine.manifest(m.Manifest(instance="a", version=1, entries=[whole, rest], segments=[(10, MIB), (11, MIB)]))
    world.wake(1)
    half = [0, ["uint8", [16], [1], 0, 0], 1, ["uint8", [MIB // 2], [1], 0, 0]]
    world.frame(1, 1, 0, 1, 7, wire.END, 8, 1, metas=half, keys=ADD)
    ask = world.until(m.AskPlace)
    assert ask.storages == [(1, MIB // 2)]
    place = m.Place(segment=31, slab=0, offset=9 * MIB, nbytes=MIB // 2)
    world.engine.placed(m.Placed(ticket=ask.ticket, places=[place]))
    entry = m.Entry(storage=1, segment=31, offset=0, nbytes=MIB // 2)
    segments = [(10, MIB), (31, MIB // 2)]
    world.engine.manifest(m.Manifest(instance="a", version=2, entries=[whole, entry], segments=segments))
    world.until(m.Done)
    world.engine.residency.check()
    world.wake(2)
    assert world.read(2, 1, 1) == bytes([8]) * 16
    world.engine.revoke(2)


GROW = [
    1,
    [
        "aten::resize_",
        [[wire.TENSOR, 1], [wire.LIST, [2 * MIB]]],
        [],
        [[[wire.SAME, 0]], [[0, 5]], False],
        "float32",
    ],
]


@pytest.mark.parametrize("shared", [False, True])
def test_what_grows_leaves_the_pool_with_what_was_written_there(world: World, shared: bool) -> None:
    """As a tensor of a GPU's own allocator does: nothing in a pool can become larger where it is."""
    world.engine.manifest(manifest("a", 10, 11))
    if shared:
        world.engine.manifest(manifest("b", 11))
    world.wake(1)
    metas = [*META, 5, ["uint8", [2 * MIB], [1], 0, 0]]
    world.frame(1, 1, 0, 1, 7, 1, 1, wire.END, 8, 1, metas=metas, keys=[*ADD, *GROW])
    ask = world.until(m.AskPlace)
    assert ask.storages == [(1, 2 * MIB)]
    place = m.Place(segment=31, slab=0, offset=8 * MIB, nbytes=2 * MIB)
    world.engine.placed(m.Placed(ticket=ask.ticket, places=[place]))
    world.until(m.Written)
    assert world.slab.view[8 * MIB : 9 * MIB] == bytes([8]) * MIB
    entries = [
        m.Entry(storage=0, segment=10, offset=0, nbytes=MIB),
        m.Entry(storage=1, segment=31, offset=0, nbytes=2 * MIB),
    ]
    segments = [(10, MIB), (31, 2 * MIB)]
    world.engine.manifest(m.Manifest(instance="a", version=2, entries=entries, segments=segments))
    assert world.until(m.Done).version == 2
    world.engine.residency.check()
    assert (11 in world.engine.residency.pool) == shared
    if shared:
        world.wake(2, "b")
        assert world.read(2, 1, 0, name="b", metas=META) == bytes([1]) * 16
        world.engine.revoke(2)
        world.until(m.Done)
    world.wake(3)
    assert world.read(3, 1, 1) == bytes([8]) * 16
    world.engine.revoke(3)


ROWS = [
    2,
    ["float32", [MIB // 64, 16], [16, 1], 0, 0],
    3,
    ["int64", [2], [1], 0, 0],
    4,
    ["float32", [2, 16], [16, 1], 0, 0],
]
EMBED = [
    1,
    [
        "aten::embedding",
        [[wire.TENSOR, 2], [wire.TENSOR, 3]],
        [],
        [[[wire.FRESH, 4, 0]], [], False],
        "float32",
    ],
]


def test_rows_of_a_table_are_read_before_the_table_has_come(small: World) -> None:
    """The table is the last of the model over a slow link; its rows are there long before, and are the right ones."""
    table = torch.arange(MIB // 4, dtype=torch.float32).view(MIB // 64, 16)
    small.slab.view[3 * MIB : 4 * MIB] = bytes(table.numpy())
    small.engine.manifest(MODEL)
    for serial in (1, 2):
        small.wake(serial)
        metas, keys = ([*META, *ROWS], EMBED) if serial == 1 else ((), ())
        index = bytes(torch.tensor([3, 777]).numpy())
        small.frame(serial, 1, wire.UPLOAD_INLINE, 90, 16, 0, index, 1, 3, 90, 91, metas=metas, keys=keys)
        small.frame(serial, 2, wire.DOWNLOAD, 7, 91, 4, -1)
        kind, rest = wire.ACK, []
        while kind == wire.ACK:
            kind, _, *rest = msgpack.unpackb(small.until(Reply).messages[0])
        assert (kind, rest[0]) == (wire.VALUE, bytes(table[[3, 777]].numpy()))
        if serial == 1:
            assert not any(isinstance(effect, m.Awake | m.LetGo) for effect in small.seen)
            small.frame(1, 3, wire.END, 8, 0)
            assert small.until(m.Done).copied_nbytes == 4 * MIB
            assert any(isinstance(effect, m.LetGo) for effect in small.seen)
    assert small.read(2, 3, 3) == bytes(table.numpy())[:16]  # now from the pool
    small.engine.revoke(2)


def test_first_use_is_told_to_the_store_once_it_differs(small: World) -> None:
    small.engine.manifest(MODEL)
    small.wake(1)
    for number, storage in enumerate((2, 0, 3, 1)):
        small.read(1, number + 1, storage, metas=META if not number else ())
    small.frame(1, 5, wire.END, 8, 0)
    assert small.until(m.FirstUse).segments == [12, 10, 13, 11]
    small.until(m.Done)
    better = m.Manifest(instance="a", version=1, entries=MODEL.entries, segments=[(s, MIB) for s in (12, 10, 13, 11)])
    small.engine.manifest(better)
    small.engine.relieve()
    small.wake(2)
    assert small.until(m.Fetch).segments == [12, 10, 13, 11]
    for number, storage in enumerate((2, 0, 3, 1)):
        small.read(2, number + 1, storage)
    small.frame(2, 5, wire.END, 8, 0)
    small.until(m.Done)
    assert not any(isinstance(effect, m.FirstUse) for effect in small.seen)


def test_a_peer_gives_what_it_has_and_the_store_the_rest(small: World) -> None:
    other = SharedMemory.create("peer", 4 * MIB)
    other.view[:] = bytes([0x77]) * (4 * MIB)
    small.device.map_peer(1, other.nbytes, b"", [other.fd])
    small.engine.manifest(MODEL)
    small.wake(1, peers=[1])
    ask = small.until(AskPeer)
    assert (ask.gpu, ask.segments) == (1, [10, 11, 12, 13])
    extents = [(12, [(2 * MIB, MIB // 2), (0, MIB // 2)]), (13, [(0, MIB // 2)]), (99, [(0, MIB)])]
    small.heard(small.wakes.peer_answered, ask.ticket, extents)
    assert small.until(m.Fetch).segments == [10, 11, 13]  # what is not whole is not taken
    assert small.read(1, 1, 2, metas=META) == bytes([0x77]) * 16
    assert small.read(1, 2, 3) == bytes([3]) * 16
    small.frame(1, 3, wire.END, 8, 0)
    done = small.until(m.Done)
    assert (done.copied_nbytes, done.peer_nbytes) == (4 * MIB, MIB)
    assert LeavePeer(1, ask.ticket) in small.seen
    other.close()


def test_a_peer_that_dies_or_cannot_be_read_is_passed_over(small: World) -> None:
    small.engine.manifest(MODEL)
    small.wake(1, peers=[1, 2])
    assert small.until(AskPeer).gpu == 1
    small.heard(small.wakes.peer_lost, 1)
    ask = small.until(AskPeer)
    assert ask.gpu == 2
    whole = [(10, [(0, MIB)])]  # of a memory that was never mapped
    small.heard(small.wakes.peer_answered, ask.ticket, whole)
    assert small.until(m.Fetch).segments == [10, 11, 12, 13]
    assert small.read(1, 1, 0, metas=META) == bytes(16)
    small.frame(1, 2, wire.END, 8, 0)
    assert small.until(m.Done).peer_nbytes == 0


def test_what_a_peer_reads_stays_until_it_is_let_go(world: World) -> None:
    world.engine.manifest(manifest("a", 10, 11))
    world.wake(1)
    world.until(m.Awake)
    world.frame(1, 1, wire.END, 8, 0, metas=META, keys=ADD)
    world.until(m.Done)
    found = world.lending.pin(m.PeerPin(gpu=1, epoch=3, ticket=4, segments=[11, 12]))
    assert [segment for segment, _ in found] == [11]
    descriptors = world.device.export().descriptors
    exported = PeerMemory(descriptors, sum(os.fstat(fd).st_size for fd in descriptors))
    content = b"".join(ctypes.string_at(exported.address + offset, nbytes) for offset, nbytes in found[0][1])
    assert content == bytes([1]) * MIB
    exported.close()
    close_all(descriptors)
    world.wake(2)
    world.frame(2, 1, 0, 1, 7)  # written: a copy, because it is being read
    world.engine.revoke(2)
    world.until(m.Done)
    world.engine.relieve()
    assert 11 in world.engine.residency.pool
    world.engine.forget("a")
    assert 11 in world.engine.residency.pool
    world.engine.forget_segments(world.lending.unpin(m.PeerUnpin(gpu=1, epoch=3, ticket=4)))
    assert 11 not in world.engine.residency.pool


def test_d6_what_an_upload_leaves_out_is_not_another_instances(small: World) -> None:
    """Nor what a created storage holds; of its own bytes an instance may see what was there, as natively."""
    if small.device.approximate:
        pytest.skip("needs a C++ compiler: g++ or clang++")
    geometry = ["uint8", [4000], [1], 0, 0]
    metas = [0, geometry, 1, geometry]
    secret = bytes([0xA7])

    def seen(serial: int, name: str, *commands: object) -> bytes:
        small.wake(serial, name)
        small.frame(serial, 1, *commands, metas=metas if serial != 2 else (), name=name)
        content = small.read(serial, 2, 50, name=name)
        small.frame(serial, 3, wire.END, 9, 0, name=name)
        small.until(m.Done)
        return content

    small.wake(1, "a")
    small.frame(1, 1, wire.UPLOAD_INLINE, 50, 4000, 0, bytes(4000), 0, 50, 0xA7, metas=metas, keys=ADD)
    assert small.read(1, 2, 50) == secret * 4000
    small.frame(1, 3, wire.END, 9, 0)
    small.until(m.Done)
    assert seen(2, "a", wire.UPLOAD_INLINE, 50, 4000, 100, b"x" * 16).count(secret) == 4000 - 16
    assert seen(3, "b", wire.UPLOAD_INLINE, 50, 4000, 100, b"x" * 16) == bytes(100) + b"x" * 16 + bytes(4000 - 116)
    small.wake(4, "b")
    small.frame(4, 1, wire.CREATE, 51, 4000, name="b")
    assert secret not in small.read(4, 2, 51, name="b")
    small.frame(4, 3, wire.END, 9, 0, name="b")
    small.until(m.Done)


def test_a_value_comes_down_from_a_gpu_that_weights_fill(small: World) -> None:
    """The bytes on their way are the host's: they were an allocation of the GPU's, and its error the instance's end."""
    if small.device.approximate:
        pytest.skip("needs a C++ compiler: g++ or clang++")
    small.engine.manifest(manifest("a", *range(10, 16)))  # all of it
    assert isinstance(small.device, HostDevice)
    library: Any = small.device.activations
    small.device.attach_thread()
    try:
        small.wake(1)
        assert small.read(1, 1, 3, metas=META) == bytes([3]) * 16
        small.frame(1, 2, wire.END, 8, 0)
        small.until(m.Done)
    finally:
        library._lib.dormouse_limit_this_thread(0)


def test_captured_memory_makes_room_before_an_idle_model_goes(small: World, monkeypatch: pytest.MonkeyPatch) -> None:
    if small.device.approximate:
        pytest.skip("needs a C++ compiler: g++ or clang++")
    small.engine.manifest(MODEL)
    small.engine.manifest(manifest("b", 20))
    assert isinstance(small.device, HostDevice)
    library: Any = small.device.activations
    small.device.attach_thread()
    captured: list[torch.Tensor] = []

    def drop(_: Interpreter) -> bool:
        given_up = bool(captured)
        captured.clear()
        return given_up

    monkeypatch.setattr(Interpreter, "drop_captured", drop)
    try:
        small.wake(1)
        small.read(1, 1, 3, metas=META)
        small.frame(1, 2, wire.END, 8, 0)
        small.until(m.Done)
        small.wake(2, "b", worth={"a": 1.0})
        captured.append(torch.empty(MIB // 2, dtype=torch.uint8))
        free = small.device.activation_stats()[2]
        assert free > MIB // 4
        small.frame(2, 1, wire.CREATE, 50, free + MIB // 4, wire.SYNC, 8, name="b", metas=META)
        assert msgpack.unpackb(small.until(Reply).messages[0])[0] == wire.VALUE
        assert (captured, 10 in small.engine.residency.pool) == ([], True)
        small.frame(2, 2, wire.CREATE, 51, MIB, wire.END, 8, 0, name="b")
        small.until(m.Done)
        assert 10 not in small.engine.residency.pool
    finally:
        library._lib.dormouse_limit_this_thread(0)


def test_n5_an_allocation_that_no_eviction_makes_room_for_evicts_nothing(small: World) -> None:
    if small.device.approximate:
        pytest.skip("needs a C++ compiler: g++ or clang++")
    small.engine.manifest(MODEL)
    small.engine.manifest(manifest("b", 20))
    assert isinstance(small.device, HostDevice)
    library: Any = small.device.activations
    small.device.attach_thread()
    try:
        small.wake(1)
        small.read(1, 1, 3, metas=META)
        small.frame(1, 2, wire.END, 8, 0)
        small.until(m.Done)
        small.wake(2, "b", worth={"a": 1.0})
        used = small.device.activation_stats()[0]
        small.frame(2, 1, wire.CREATE, 50, 6 * MIB - used, wire.SYNC, 8, name="b", metas=META)
        kind, _, name, text, _ = msgpack.unpackb(small.until(Reply).messages[0])
        assert (kind, name) == (wire.FAILED, "OutOfMemoryError")
        assert f"{size(6 * MIB - used)} asked for. So none was evicted." in text
        assert 10 in small.engine.residency.pool
        small.frame(2, 2, wire.CREATE, 51, 4 * MIB - used, wire.SYNC, 8, name="b")
        assert msgpack.unpackb(small.until(Reply).messages[0])[0] == wire.VALUE
        assert 10 not in small.engine.residency.pool
        small.frame(2, 3, wire.END, 8, 0, name="b")
        small.until(m.Done)
    finally:
        library._lib.dormouse_limit_this_thread(0)
