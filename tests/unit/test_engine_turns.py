"""Seats and turns on a device: a turn is lost between two frames and never within one; what is a lease's own stays, or
goes to host memory and comes back; random state and settings follow the turn.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import needs
import pytest
from engine_world import ADD, META, MIB, MODEL, Reply, World, close, manifest

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.held import LeaseState
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

RAND = [2, ["float32", [16], [1], 0, 0]]
NORMAL: list[Any] = [7, ["aten::normal_", [[wire.TENSOR, 2]], [], [[[wire.SAME, 0]], [], False], "float32"]]


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def new(**how: Any) -> World:
        made.append(World(**how))
        return made[-1]

    yield new
    for world in made:
        close(world)


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    world = make()
    world.engine.manifest(MODEL)
    world.engine.manifest(manifest("b", 10, 11))
    return world


def state(world: World, serial: int) -> LeaseState:
    return world.leases.machine.leases[serial].state


def heard(world: World, serial: int, number: int, *commands: Any, name: str = "a", **defs: Any) -> None:
    """A frame that has come, and that the compute thread has not looked at."""
    frame = [serial, 5, number, [list(defs.get("metas", ())), list(defs.get("keys", ()))], list(commands)]
    world.heard(world.hear, e.Heard(name, msgpack.packb(frame)))


def pause(world: World, serial: int) -> None:
    world.does(m.Pause(serial=serial))


def turn(world: World, serial: int) -> None:
    world.does(m.Turn(serial=serial))


def end(world: World, serial: int, number: int, name: str = "a") -> m.Done:
    world.frame(serial, number, wire.END, 99, wire.END_QUIET, name=name)
    done = world.until(m.Done)
    assert (done.serial, done.outcome) == (serial, "ended")
    return done


def place(world: World, ask: m.AskPlace, slot: int) -> m.Placed:
    places = [
        m.Place(segment=100 + slot + n, slab=0, offset=(slot + n) * MIB, nbytes=nbytes)
        for n, (_, nbytes) in enumerate(ask.storages)
    ]
    return m.Placed(ticket=ask.ticket, places=places)


def values(world: World) -> list[bytes]:
    """What has been downloaded and not looked at."""
    found = []
    while not world.effects.empty():
        effect = world.effects.get()
        if isinstance(effect, Reply):
            replies = [msgpack.unpackb(message) for message in effect.messages]
            found += [reply[2] for reply in replies if reply[0] == wire.VALUE]
    return found


def test_a_turn_that_is_lost_in_the_middle_of_a_frame_ends_with_it(world: World) -> None:
    world.wake(1)
    world.until(m.Awake)
    heard(world, 1, 1, wire.CREATE, 50, MIB, wire.DOWNLOAD, 7, 1, 0, -1, metas=META)
    world.heard(world.hear, m.Pause(serial=1))
    assert state(world, 1) is LeaseState.YIELDING
    world.wake(2, "b")  # which waits for that frame
    world.run()
    assert (state(world, 1), state(world, 2)) == (LeaseState.PAUSED, LeaseState.RUNNING)
    assert values(world) == [bytes([1]) * 16]
    heard(world, 1, 2, wire.DOWNLOAD, 8, 2, 0, -1)
    heard(world, 1, 3, wire.DOWNLOAD, 9, 3, 0, -1)
    world.run()
    assert [effect for effect in [world.until(m.WantsTurn)] if effect.serial == 1]
    assert values(world) == []
    assert world.read(2, 1, 1, name="b", metas=META) == bytes([1]) * 16
    end(world, 2, 2, "b")
    turn(world, 1)
    assert values(world) == [bytes([2]) * 16, bytes([3]) * 16]
    end(world, 1, 4)
    assert not [effect for effect in world.seen if isinstance(effect, m.WantsTurn)], "it is asked for once"


def test_what_a_lease_has_made_is_there_when_its_turn_comes_again(world: World) -> None:
    world.wake(1)
    world.frame(1, 1, wire.UPLOAD_INLINE, 50, 16, 0, b"x" * 16, 0, 3, 5, metas=META, keys=ADD)  # and storage 3 += 5
    pause(world, 1)
    world.wake(2, "b")
    assert world.read(2, 1, 0, name="b", metas=META) == bytes([0]) * 16
    end(world, 2, 2, "b")
    turn(world, 1)
    assert world.read(1, 2, 50) == b"x" * 16
    assert world.read(1, 3, 3) == bytes([8]) * 16
    end(world, 1, 4)


def test_a_turn_that_is_lost_in_the_middle_of_a_write_back(world: World) -> None:
    """Its END is over the compute thread: another computes, and the write-back goes on beside it."""
    world.wake(1)
    world.frame(1, 1, 0, 3, 5, wire.END, 8, wire.END_WAIT, metas=META, keys=ADD)
    ask = world.until(m.AskPlace)
    pause(world, 1)
    assert state(world, 1) is LeaseState.ENDING
    world.wake(2, "b")
    assert world.read(2, 1, 0, name="b", metas=META) == bytes([0]) * 16
    placed = place(world, ask, 8)
    world.engine.placed(placed)
    assert world.until(m.Written).ticket == ask.ticket
    assert bytes(world.slab.view[8 * MIB : 8 * MIB + 4]) == bytes([8]) * 4
    pause(world, 1)
    world.engine.manifest(manifest("a", 10, 11, 12, placed.places[0].segment, version=2))
    done = world.until(m.Done)
    assert (done.serial, done.outcome, done.version, done.wrote) == (1, "ended", 2, True)
    assert world.read(2, 2, 1, name="b") == bytes([1]) * 16
    end(world, 2, 3, "b")


def test_an_instance_that_dies_without_its_turn(world: World) -> None:
    world.wake(1)
    world.frame(1, 1, wire.CREATE, 50, MIB, metas=META)
    pause(world, 1)
    heard(world, 1, 2, wire.DOWNLOAD, 7, 1, 0, -1)
    world.wake(2, "b")
    world.engine.forget("a")
    done = world.until(m.Done)
    assert (done.serial, done.outcome) == (1, "revoked")
    assert sorted(world.engine.residency.pool.segments()) == [10, 11]  # b's
    assert world.read(2, 1, 1, name="b", metas=META) == bytes([1]) * 16
    end(world, 2, 2, "b")


def test_a_revoked_seat_with_commands_under_way(world: World) -> None:
    """One frame is on its way to the compute thread, one waits for a turn: neither runs, and the instance is told."""
    world.wake(1)
    world.frame(1, 1, wire.SYNC, 3, metas=META)
    heard(world, 1, 2, 0, 1, 7, wire.DOWNLOAD, 7, 1, 0, -1, keys=ADD)
    world.heard(world.hear, m.Pause(serial=1))
    heard(world, 1, 3, wire.DOWNLOAD, 8, 1, 0, -1)
    world.heard(world.hear, m.Revoke(serial=1))
    assert world.orders.items.qsize() == 3  # the frame, that the turn is lost, and the end
    done = world.until(m.Done)
    assert [effect.serial for effect in world.seen if isinstance(effect, m.WantsTurn)] == [1]
    assert (done.serial, done.outcome) == (1, "revoked")
    replies = [message for effect in world.seen if isinstance(effect, Reply) for message in effect.messages]
    assert [msgpack.unpackb(reply)[0] for reply in replies] == [wire.VALUE, wire.ACK, wire.REFUSED]
    world.wake(2)
    assert world.read(2, 1, 1) == bytes([1]) * 16  # storage 1 += 7 has not been
    end(world, 2, 2)


@needs.COMPILER
def test_eight_seats_that_together_exceed_the_memory(make: Callable[..., World]) -> None:
    """Each has a model of 2 MiB and makes 1 MiB; the GPU has 6 MiB. Who has had no turn for longest leaves, and finds
    all as it was.
    """
    world = make(names="abcdefgh", total=6 * MIB, nbytes_s=1e12)
    asked: dict[str, m.Placed] = {}
    for number, name in enumerate(world.names):
        world.engine.manifest(manifest(name, *((10, 11) if number % 2 else (12, 13))))

    def spill() -> None:
        """The store gives a place to whatever has to leave, and keeps it until it is let go."""
        while not world.effects.empty():
            effect = world.effects.get()
            if isinstance(effect, m.AskPlace):
                assert effect.instance not in asked, "it had left before"
                asked[effect.instance] = place(world, effect, 4 + len(asked))
                world.engine.placed(asked[effect.instance])
            elif isinstance(effect, m.LetGo):
                for name in [name for name, placed in asked.items() if placed.ticket == effect.ticket]:
                    del asked[name]
            else:
                world.seen.append(effect)

    def until(condition: Callable[[], bool]) -> None:
        """Copies end when their threads come to it, and say so."""
        while True:
            world.told.clear()
            world.run()
            spill()
            if condition():
                return
            assert world.told.wait(60)

    for number, name in enumerate(world.names):
        serial = number + 1
        world.wake(serial, name)
        until(lambda: serial in world.leases.machine.leases)  # noqa: B023  (called at once)
        content = bytes([65 + number]) * 16
        world.frame(serial, 1, wire.CREATE, 50, MIB, wire.UPLOAD_INLINE, 50, MIB, 0, content, metas=META, name=name)
        spill()
        pause(world, serial)
    states = [state(world, serial) for serial in range(1, 9)]
    assert states.count(LeaseState.AWAY) == len(asked) >= 4, states
    assert set(states) == {LeaseState.AWAY, LeaseState.PAUSED}
    for number, name in enumerate(world.names):
        serial = number + 1
        turn(world, serial)
        until(lambda: state(world, serial) is LeaseState.RUNNING)  # noqa: B023
        world.frame(serial, 2, wire.DOWNLOAD, 7, 50, 0, -1, wire.DOWNLOAD, 8, 1, 0, -1, name=name)
        spill()
        replies = [effect for effect in world.seen if isinstance(effect, Reply) and effect.instance == name]
        answers = [msgpack.unpackb(message) for message in replies[-1].messages]
        model = 11 if number % 2 else 13
        assert [answer[2] for answer in answers if answer[0] == wire.VALUE] == [
            bytes([65 + number]) * 16,
            bytes([model - 10]) * 16,
        ]
        world.frame(serial, 3, wire.END, 9, wire.END_QUIET, name=name)
        spill()
    done = [effect for effect in world.seen if isinstance(effect, m.Done)]
    assert [(each.serial, each.outcome) for each in done] == [(serial, "ended") for serial in range(1, 9)]
    assert asked == {}


@pytest.mark.parametrize("late", [False, True])
@needs.COMPILER
def test_a_seat_whose_storages_have_no_room_on_the_host(make: Callable[..., World], late: bool) -> None:
    """``late``: another's that has left takes the room that is left. Its request fails with a word of its own; the
    others go on.
    """
    world = make(names="abc", total=4 * MIB, nbytes_s=1e12)
    for name, segments in (("a", (10,)), ("b", (11,)), ("c", (12, 13))):
        world.engine.manifest(manifest(name, *segments))
    for serial, name in ((1, "a"), (2, "b")):
        world.wake(serial, name)
        world.frame(serial, 1, wire.CREATE, 50, MIB, metas=META, name=name)
        pause(world, serial)
    world.wake(3, "c")
    first = world.until(m.AskPlace)
    assert first.instance == "a"
    refused = m.PlaceRefused(ticket=first.ticket, text="the host is full")
    if late:
        world.engine.placed(place(world, first, 8))
        assert state(world, 1) is LeaseState.AWAY
        assert state(world, 3) is LeaseState.RUNNING
        world.frame(3, 1, wire.CREATE, 51, MIB, wire.SYNC, 3, metas=META, name="c")
        turn(world, 1)
        pause(world, 3)
        second = world.until(m.AskPlace)
        assert second.instance == "b"
        refused = m.PlaceRefused(ticket=second.ticket, text="the host is full")
    world.engine.place_refused(refused)
    done = world.until(m.Done)
    assert (done.serial, done.outcome) == (2 if late else 1, "revoked")
    replies = [message for effect in world.seen if isinstance(effect, Reply) for message in effect.messages]
    told = [reply for reply in map(msgpack.unpackb, replies) if reply[0] == wire.REFUSED]
    assert [(serial, kind) for _, serial, _, kind in told] == [(done.serial, wire.SEAT_LOST)]
    assert "no room" in told[0][2]
    if late:
        assert world.read(1, 2, 0) == bytes([0]) * 16
        end(world, 1, 3)
        turn(world, 3)
        end(world, 3, 2, "c")
    else:
        assert world.read(3, 1, 1, name="c", metas=META) == bytes([3]) * 16
        end(world, 3, 2, "c")
        turn(world, 2)
        end(world, 2, 2, "b")


def test_a_seat_that_was_left_before_its_first_command(make: Callable[..., World]) -> None:
    world = make(total=4 * MIB, nbytes_s=1e12)
    world.engine.manifest(manifest("a", 10, 11))
    world.engine.manifest(manifest("b", 12, 13, 10))
    world.wake(1)
    world.frame(1, 1, wire.SYNC, 3, metas=META)
    end(world, 1, 2)
    world.wake(2)
    pause(world, 2)
    world.wake(3, "b")
    assert state(world, 2) is LeaseState.PAUSED  # all of it fits
    end(world, 3, 1, "b")
    world.engine.manifest(manifest("b", 12, 13, 14, version=2))
    world.answering = False
    world.wake(4, "b")
    assert state(world, 2) is LeaseState.AWAY
    world.does(m.Revoke(serial=4))
    world.until(m.Done)
    world.answering = True
    turn(world, 2)
    assert [world.read(2, number + 1, number) for number in (0, 1)] == [bytes([0]) * 16, bytes([1]) * 16]
    end(world, 2, 3)


def test_an_operation_that_is_refused_memory_has_others_leave(make: Callable[..., World]) -> None:
    """In the middle of a command: what leaves is copied out by the thread that waits for the room."""
    world = make(names="ab", total=5 * MIB, nbytes_s=1e12)
    if world.device.approximate:
        pytest.skip("needs a C++ compiler: g++ or clang++")
    world.engine.manifest(manifest("a", 10, 11))
    world.engine.manifest(manifest("b", 12))
    world.device.attach_thread()
    library: Any = world.device.activations  # type: ignore[attr-defined]
    try:
        world.wake(1)
        world.frame(1, 1, wire.UPLOAD_INLINE, 50, MIB, 0, b"y" * 16, metas=META)
        pause(world, 1)
        world.wake(2, "b")
        world.post(answer_place, world)
        world.frame(2, 1, wire.CREATE, 51, 3 * MIB, wire.SYNC, 3, metas=META, name="b")
        assert state(world, 1) is LeaseState.AWAY
        replies = [msgpack.unpackb(message) for message in world.until(Reply).messages]
        while replies[0][0] == wire.ACK:
            replies = [msgpack.unpackb(message) for message in world.until(Reply).messages]
        assert replies[0][:2] == [wire.VALUE, 3]
        end(world, 2, 2, "b")
        turn(world, 1)
        assert world.read(1, 2, 50) == b"y" * 16
        assert world.read(1, 3, 1) == bytes([1]) * 16
        end(world, 1, 4)
    finally:
        library._lib.dormouse_limit_this_thread(0)


def answer_place(world: World) -> None:
    """On the executor's thread: its store answers at once."""
    said = world.to_store

    def to_store(message: Any) -> None:
        said(message)
        if isinstance(message, m.AskPlace):
            world.post(world.hear, place(world, message, 8))

    world.leases._outside.to_store = to_store  # type: ignore[method-assign]


def test_random_state_follows_the_turn(world: World) -> None:
    def draws(interrupted: bool, serial: int) -> list[bytes]:
        found = []
        world.wake(serial)
        for number, storage in enumerate((60, 61)):
            seed = [wire.SEED, 0, 11] if not number else []
            defs: dict[str, Any] = {"metas": [*META, *RAND], "keys": NORMAL} if serial == 1 and not number else {}
            world.frame(
                serial,
                number + 1,
                *seed,
                wire.CREATE,
                storage,
                64,
                7,
                storage,
                wire.DOWNLOAD,
                7,
                storage,
                2,
                -1,
                **defs,
            )
            found += values(world)
            if interrupted and not number:
                pause(world, serial)
                world.wake(serial + 1, "b")
                seed = [wire.SEED, 0, 5]
                world.frame(
                    serial + 1,
                    1,
                    *seed,
                    wire.CREATE,
                    70,
                    64,
                    7,
                    70,
                    wire.DOWNLOAD,
                    7,
                    70,
                    2,
                    -1,
                    metas=RAND,
                    keys=NORMAL,
                    name="b",
                )
                assert values(world) != []
                end(world, serial + 1, 2, "b")
                turn(world, serial)
        end(world, serial, 3)
        return found

    alone, beside = draws(False, 1), draws(True, 2)
    assert len(alone) == 2
    assert alone == beside


def test_two_turns_at_once(make: Callable[..., World]) -> None:
    world = make(turns=2)
    world.engine.manifest(MODEL)
    world.engine.manifest(manifest("b", 10, 11))
    world.wake(1)
    world.until(m.Awake)
    world.wake(2, "b")
    assert [state(world, serial) for serial in (1, 2)] == [LeaseState.RUNNING] * 2
    for number, storage in enumerate((0, 1)):
        metas = META if not number else ()
        assert world.read(1, number + 1, storage, metas=metas) == bytes([storage]) * 16
        assert world.read(2, number + 1, storage, name="b", metas=metas) == bytes([storage]) * 16
    end(world, 1, 3)
    end(world, 2, 3, "b")


def test_a_lease_that_never_was_used_leaves_no_trace(world: World) -> None:
    world.wake(1)
    world.frame(1, 1, wire.SYNC, 3, metas=META)
    end(world, 1, 2)
    world.seen.clear()
    world.wake(2)
    assert world.leases.machine.leases.keys() == {2}
    world.does(m.Over(serials=[2]))
    assert world.leases.machine.leases == {}
    assert world.nothing_more()
    assert world.seen == []
    heard(world, 2, 1, wire.SYNC, 3)
    assert msgpack.unpackb(world.until(Reply).messages[0])[:2] == [wire.REFUSED, 2]


def test_who_says_that_a_lease_was_not_used_and_has_used_it_is_ended(world: World) -> None:
    world.wake(1)
    world.frame(1, 1, wire.SYNC, 3, metas=META)
    world.does(m.Over(serials=[1]))
    assert "commands" in world.until(o.Expel).text
    assert world.until(m.Done).outcome == "violated"


def test_an_unused_lease_whose_model_came_is_done(world: World) -> None:
    world.wake(1)
    world.does(m.Over(serials=[1]))
    done = world.until(m.Done)
    assert (done.outcome, done.copied_nbytes, dict(done.resident)["a"]) == ("ended", 4 * MIB, 4 * MIB)
