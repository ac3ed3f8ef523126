"""What may happen at a bad moment: answers that come late, leases that end early, other GPUs that ask meanwhile, and
instances that mean harm.
"""

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from engine_world import ADD, META, MIB, MODEL, Reply, Violated, World, close, manifest

from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.gpuserver.executor import arrivals
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

ROWS = [2, ["float32", [MIB // 64, 16], [16, 1], 0, 0], 3, ["int64", [2], [1], 0, 0]]
ROWS += [4, ["float32", [2, 16], [16, 1], 0, 0]]
EMBED = ["aten::embedding", [[wire.TENSOR, 2], [wire.TENSOR, 3]], [], [[[wire.FRESH, 4, 0]], [], False], "float32"]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    close(world)


def place(segment: int, slot: int) -> m.Place:
    return m.Place(segment=segment, slab=0, offset=slot * MIB, nbytes=MIB)


def write_storage_1(world: World) -> m.AskPlace:
    """A request of ``a`` adds 7 to storage 1 and ends."""
    world.wake(1)
    world.frame(1, 1, 0, 1, 7, wire.END, 8, 1, metas=META, keys=ADD)
    return world.until(m.AskPlace)


@pytest.mark.parametrize(
    "commands", [[wire.FREE, 1, 1, wire.CREATE, 1, 64], [wire.FREE, 1, True], [wire.FREE, 1, None]]
)
def test_numbers_that_are_used_again_or_are_none_are_a_violation(world: World, commands: list[Any]) -> None:
    world.engine.manifest(manifest("a", 10, 11))
    world.wake(1)
    world.frame(1, 1, *commands, wire.END, 8, 1, metas=META)
    assert world.until(Violated).instance == "a"
    assert world.until(m.Done).outcome == "violated"


def test_a_commit_cannot_be_revoked(world: World) -> None:
    world.engine.manifest(manifest("a", 10, 11))
    ask = write_storage_1(world)
    world.engine.placed(m.Placed(ticket=ask.ticket, places=[place(31, 9)]))
    world.until(m.Written)  # the store commits from here on
    world.engine.revoke(1)
    assert world.nothing_more()
    world.engine.manifest(manifest("a", 10, 31, version=2))
    done = world.until(m.Done)
    assert (done.outcome, done.version) == ("ended", 2)


def test_an_end_waits_for_its_own_version(world: World) -> None:
    world.engine.manifest(MODEL)
    world.wake(1)
    world.until(m.Awake)
    world.frame(1, 1, wire.FREE, 1, 3, wire.END, 8, 1, metas=META)
    ask = world.until(m.AskPlace)
    world.engine.placed(m.Placed(ticket=ask.ticket, places=[]))
    world.until(m.Written)
    reordered = [(segment, MIB) for segment in (12, 10, 13, 11)]
    world.engine.manifest(m.Manifest(instance="a", version=1, entries=MODEL.entries, segments=reordered))
    assert world.nothing_more()
    world.engine.manifest(manifest("a", 10, 11, 12, version=2))
    assert world.until(m.Done).version == 2


def test_what_a_lease_uses_is_not_retired_under_it(world: World) -> None:
    world.engine.manifest(manifest("a", 10, 11))
    world.engine.manifest(manifest("b", 11))
    world.wake(1)
    assert world.read(1, 1, 1, metas=META) == bytes([1]) * 16
    world.engine.manifest(manifest("a", 10, version=2))
    world.engine.dropped("b")
    assert world.read(1, 2, 1) == bytes([1]) * 16
    world.frame(1, 3, wire.END, 8, 0)
    world.until(m.Done)
    assert 11 not in world.engine.residency.pool


def test_a_private_copy_outlives_its_segment(world: World) -> None:
    world.engine.manifest(manifest("a", 10, 11))
    world.engine.manifest(manifest("b", 11))
    ask = write_storage_1(world)
    world.engine.manifest(manifest("a", 10, version=2))
    world.engine.dropped("b")
    world.engine.placed(m.Placed(ticket=ask.ticket, places=[place(31, 9)]))
    world.until(m.Written)
    assert world.slab.view[9 * MIB : 9 * MIB + 4] == bytes([8]) * 4
    world.engine.manifest(manifest("a", 10, 31, version=3))
    assert world.until(m.Done).version == 3


def test_a_command_that_waits_for_the_model_learns_that_its_lease_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.answering = False
    world.engine.manifest(MODEL)
    world.wake(1)
    world.until(m.Fetch)
    board = world.compute._leases[1].board
    arrival = board.arrival(10) if board is not None else None
    assert arrival is not None
    waits, issued_by = threading.Event(), arrival.issued_by

    def waiting(deadline_s: float) -> bool:
        waits.set()
        return issued_by(deadline_s)

    monkeypatch.setattr(arrival, "issued_by", waiting)
    frame = threading.Thread(target=world.frame, args=(1, 1, wire.DOWNLOAD, 7, 0, 0, -1), kwargs={"metas": META})
    frame.start()
    assert waits.wait(60)
    world.heard(world.hear, m.Revoke(serial=1))
    frame.join(60)
    assert not frame.is_alive()
    assert world.until(m.Done).outcome == "revoked"


def test_what_is_read_directly_does_not_hold_up_the_rest(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "ISSUE_S", 3.0)
    world.wakes._batch_nbytes = MIB
    table = torch.arange(MIB // 4, dtype=torch.float32).view(MIB // 64, 16)
    for slot in (0, 1):
        world.slab.view[slot * MIB : (slot + 1) * MIB] = bytes(table.numpy())
    world.engine.manifest(MODEL)
    world.wake(1)
    index = bytes(torch.tensor([3, 777]).numpy())
    upload = [wire.UPLOAD_INLINE, 90, 16, 0, index]
    world.frame(1, 1, *upload, 1, 0, 90, 91, 1, 1, 90, 92, metas=[*META, *ROWS], keys=[1, EMBED])
    assert world.read(1, 2, 2) == bytes([2]) * 16
    world.engine.revoke(1)


def test_a_late_answer_copies_nothing_into_what_was_given_up(world: World) -> None:
    world.wakes._batch_nbytes = MIB
    world.answering = False
    world.engine.manifest(MODEL)
    world.wake(1)
    first, second = world.until(m.Fetch), world.until(m.Fetch)
    world.heard(world.wakes.fetch_failed, m.FetchFailed(ticket=first.ticket, text="a disk"))
    world.frame(1, 1, 0, 1, 7, wire.SYNC, 3, metas=META, keys=ADD)  # storage 1 is of the second batch
    world.frame(1, 2, wire.CREATE, 60, MIB, wire.END, 8, 1)
    ask = world.until(m.AskPlace)
    world.engine.placed(m.Placed(ticket=ask.ticket, places=[place(30, 8)]))
    world.until(m.Written)
    content = bytes(world.slab.view[8 * MIB : 9 * MIB])
    entry = m.Entry(storage=60, segment=30, offset=0, nbytes=MIB)
    world.heard(world.answer, second)
    segments = [*MODEL.segments, (30, MIB)]
    world.engine.manifest(m.Manifest(instance="a", version=2, entries=[*MODEL.entries, entry], segments=segments))
    world.until(m.Done)
    held = world.device.storage(world.engine.residency.pool.offset(30), MIB)
    assert bytes(held) == content


def test_bytes_that_have_not_moved_yet_are_not_given_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.engine.manifest(MODEL)
    world.wake(1)
    world.until(m.Awake)
    world.engine.revoke(1)
    world.until(m.Done)
    world.engine.manifest(manifest("a", 11, 13, version=2))  # holes where 10 and 12 were
    big = m.Entry(storage=0, segment=40, offset=0, nbytes=4 * MIB)
    world.engine.manifest(m.Manifest(instance="b", version=1, entries=[big], segments=[(40, 4 * MIB)]))
    real, found = world.device.copy_in, []

    def copy_in(copies: Any, on_done: Any, after: Any = None) -> Any:
        found.append(world.lending.pin(m.PeerPin(gpu=1, epoch=1, ticket=1, segments=[11, 13])))
        return real(copies, on_done, after)

    monkeypatch.setattr(world.device, "copy_in", copy_in)
    world.answering = False
    world.wake(2, "b", worth={"a": 1000.0})
    assert world.engine.residency.moved_nbytes > 0
    world.engine.revoke(2)
    moved = [segment for segment, _ in found[0]]
    assert len(moved) < 2  # one at least had to move
    world.lending.unpin(m.PeerUnpin(gpu=1, epoch=1, ticket=1))


def test_a_cancelled_wake_gives_away_what_has_arrived(world: World) -> None:
    world.engine.manifest(MODEL)
    world.wake(1)
    world.read(1, 1, 0, metas=META)
    world.engine.revoke(1)
    world.until(m.Done)
    there = list(world.engine.residency.pool.segments())
    assert there
    assert [segment for segment, _ in world.lending.pin(m.PeerPin(gpu=1, epoch=1, ticket=1, segments=there))] == there
    world.lending.unpin(m.PeerUnpin(gpu=1, epoch=1, ticket=1))


def test_two_batches_of_one_failed_wake_fail_once(world: World) -> None:
    world.wakes._batch_nbytes = MIB
    world.answering = False
    world.engine.manifest(MODEL)
    world.wake(1)
    for fetch in (world.until(m.Fetch), world.until(m.Fetch)):
        world.heard(world.wakes.fetch_failed, m.FetchFailed(ticket=fetch.ticket, text="a disk"))
    world.frame(1, 1, wire.DOWNLOAD, 7, 3, 0, -1, metas=META)
    assert "a disk" in msgpack.unpackb(world.until(Reply).messages[0])[3]
    world.engine.revoke(1)
    assert world.until(m.Done).resident == [("a", 0)]
    assert sum(isinstance(effect, m.LetGo) for effect in world.seen) == 2


def test_a_size_that_comes_after_its_instance_is_gone_makes_no_model() -> None:
    scheduler = Scheduler(seed=1, revoke_s=1, max_waiting=4)
    scheduler.handle(ev.InstanceKnown("a", "f"), 0.0)
    scheduler.handle(ev.InstanceLost("a"), 1.0)
    scheduler.handle(ev.ModelSized("a", 2, 100), 2.0)
    assert "a" not in scheduler.models
    scheduler.handle(ev.ModelSized("b", 2, 300), 2.0)  # before it is known
    scheduler.handle(ev.InstanceKnown("b", "f"), 2.0)
    assert scheduler.models["b"].nbytes == 300


@contextmanager
def mappings_exhausted() -> Iterator[None]:
    """The kernel gives this process no more mappings."""
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    if most > 1 << 18:
        pytest.skip("needs vm.max_map_count of at most 262144")
    libc = ctypes.CDLL(None, use_errno=True)
    filler = mmap.mmap(-1, most * mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    view = ctypes.c_char.from_buffer(filler)
    start, end = ctypes.addressof(view), 0
    while not libc.mprotect(ctypes.c_void_p(start + end), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ):
        end += 2 * mmap.PAGESIZE
    try:
        yield
    finally:
        del view
        filler.close()


def test_no_mapping_to_be_had_in_the_middle_of_a_wake() -> None:
    """That wake fails and says why, other models stay, and it can be tried again."""
    world = World("pages", 12 * MIB)
    world.device.populated.wait(60)  # type: ignore[attr-defined]
    world.engine.manifest(manifest("b", 11, 12, 13))
    world.engine.manifest(manifest("a", *range(14, 20)))
    world.wake(1, "b")
    assert world.read(1, 1, 2, name="b", metas=META) == bytes([3]) * 16
    world.frame(1, 2, wire.END, 8, 0, name="b")
    world.until(m.Done)
    with mappings_exhausted():
        world.wake(2)
    world.frame(2, 1, wire.DOWNLOAD, 7, 0, 0, -1, wire.END, 8, 0, metas=META)
    kind, _, name, text, _ = msgpack.unpackb(world.until(Reply).messages[0])
    assert (kind, name) == (wire.FAILED, "OutOfMemoryError")
    assert "cannot map a granule of 2,097,152 bytes" in text
    assert world.until(m.Done).outcome == "ended"
    world.engine.residency.check()
    for serial, instance, content in ((3, "b", 1), (4, "a", 0), (5, "b", 1)):
        world.wake(serial, instance)
        assert world.read(serial, 1, 0, name=instance) == bytes([content]) * 16
        world.frame(serial, 2, wire.END, 8, 0, name=instance)
        assert world.until(m.Done).copied_nbytes == (6 * MIB if instance == "a" else 0)
    close(world)
