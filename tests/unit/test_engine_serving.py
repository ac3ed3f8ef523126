"""The compute thread hears the frames of the lease that it serves on the instance's own connection, a real one; until
there is anything else to do. What it does not expect there, the gate judges.
"""

import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from engine_world import ADD, META, MODEL, Violated, World, close, manifest

from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.gate import FrameHeader, follows
from dormouse.core.decisions.leases.held import LeaseState
from dormouse.core.links import zmtp
from dormouse.core.links.loan import Loan
from dormouse.gpuserver.executor.orders import Posted
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

WAIT_S = 60.0
ZEROS, ONES = bytes(16), bytes([1]) * 16  # of storages 0 and 1


class Serving(World):
    """Whose instances have connections. ``executed``: what the compute thread has said of frames."""

    def __init__(self) -> None:
        self.executed: list[e.Executed] = []
        self.loans: list[Loan] = []
        self.ours, self._theirs = socket.socketpair()  # the instance's end, the executor's
        self.ours.settimeout(WAIT_S)
        self.lent = False
        super().__init__()
        self.compute._turn_s = WAIT_S

    def hear(self, event: Posted) -> None:
        if isinstance(event, e.Executed):
            self.executed.append(event)
        super().hear(event)

    def lend(self, instance: str) -> Loan | None:
        if instance != "a" or self.lent:
            return None
        reader = zmtp.Reader(1 << 20)
        reader.feed(zmtp.OPENING)
        self.lent = True
        no_link: Any = None  # it comes back to `take_back` below
        self.loans.append(Loan(no_link, self._theirs, reader))
        return self.loans[-1]

    def take_back(self, loan: Loan) -> None:
        assert loan is self.loans[-1]
        self.lent = False
        for data in loan.heard:
            self.leases.dispatch(e.Heard("a", data))

    def say(self, serial: int, number: int, *commands: Any, secret: int = 5, keys: Any = ()) -> None:
        """On the connection, not to the executor's thread."""
        self.ours.sendall(zmtp.framed(msgpack.packb([serial, secret, number, [[], list(keys)], list(commands)])))

    def hear_out(self) -> None:
        """As the compute thread does when something has come."""
        self.compute.carry_out(self.orders.next_item())
        self.run()

    def replies(self, count: int) -> list[Any]:
        """So many of those that came on the connection."""
        reader = zmtp.Reader(1 << 20)
        found: list[Any] = []
        reader.feed(zmtp.OPENING)
        while len(found) < count:
            for message in reader.feed(self.ours.recv(1 << 16)):
                found += [list(reply) for reply in wire.replies(message)]
        assert len(found) == count, found
        return found

    def _theirs_waits(self) -> bool:
        """Whether there is something to be read yet."""
        return bool(select.select([self._theirs], [], [], 0)[0])

    def while_it_listens(self, *events: Any) -> threading.Thread:
        """These come when the compute thread, which is the test's, waits for frames."""

        def later() -> None:
            end = threading.Event()
            while not (self.orders._sleeps and not self._theirs_waits()):
                end.wait(0.001)
            for event in events:
                self.heard(self.hear, event)

        thread = threading.Thread(target=later)
        thread.start()
        return thread


@pytest.fixture
def world() -> Iterator[Serving]:
    world = Serving()
    world.engine.manifest(MODEL)
    world.engine.manifest(manifest("b", 10, 11))
    yield world
    close(world)
    world.ours.close()
    world._theirs.close()


def state(world: World, serial: int) -> LeaseState:
    return world.leases.machine.leases[serial].state


def test_a_request_is_served_without_the_executors_thread(world: Serving) -> None:
    world.wake(1)
    world.say(1, 2, wire.DOWNLOAD, 8, 1, 0, -1)
    world.say(1, 3, wire.END, 9, wire.END_QUIET)
    world.frame(1, 1, wire.DOWNLOAD, 7, 0, 0, -1, metas=META)
    done = world.until(m.Done)
    assert (done.serial, done.outcome) == (1, "ended")
    assert world.replies(4) == [
        [wire.VALUE, 7, ZEROS],
        [wire.ACK, 1, 1],
        [wire.VALUE, 8, ONES],
        [wire.ACK, 1, 2],
    ]
    (executed,) = world.executed
    assert (executed.frames, executed.heard, executed.ended is not None) == (3, 2, True)
    assert not world.lent


@pytest.fixture
def warm(world: Serving) -> Serving:
    """The instance's first lease had commands, and its model is still there."""
    world.wake(1)
    world.say(1, 2, wire.END, 9, wire.END_QUIET)
    world.frame(1, 1, wire.DOWNLOAD, 7, 0, 0, -1, metas=META)
    assert world.until(m.Done).serial == 1
    world.replies(2)
    world.executed.clear()
    return world


@pytest.fixture
def listening(warm: Serving) -> Serving:
    """The compute thread waits for the first frame of its next."""
    warm.leases.machine._state.turn_s = WAIT_S
    warm.wake(3)
    assert (warm.lent, warm.orders.idle, warm.executed) == (True, True, [])
    return warm


def test_the_first_frame_of_the_next_request_wakes_the_compute_thread_alone(listening: Serving) -> None:
    listening.say(3, 1, wire.DOWNLOAD, 7, 1, 0, -1)
    listening.say(3, 2, wire.END, 9, wire.END_QUIET)
    listening.hear_out()
    (executed,) = listening.executed
    assert (executed.frames, executed.heard, executed.ended is not None) == (2, 2, True)
    assert listening.until(m.Done).outcome == "ended"
    assert listening.replies(2) == [[wire.VALUE, 7, ONES], [wire.ACK, 3, 1]]
    assert not listening.lent


@pytest.mark.parametrize(
    ("serial", "number", "secret", "complaint"),
    [
        (3, 2, 5, "frame 2 after frame 0"),
        (3, 0, 5, "frame 0 after frame 0"),
        (3, 1, 6, "a frame under lease 3, which is not this instance's"),
    ],
)
def test_a_first_frame_that_is_not_the_first_is_judged_by_the_gate(
    listening: Serving, serial: int, number: int, secret: int, complaint: str
) -> None:
    listening.say(serial, number, wire.DOWNLOAD, 8, 1, 0, -1, secret=secret)
    listening.hear_out()
    assert listening.until(Violated).text == complaint
    assert listening.until(m.Done).outcome == "violated"
    assert [executed.frames for executed in listening.executed] == [0]


def test_a_request_without_commands_ends_and_the_next_is_not_waited_for(listening: Serving) -> None:
    listening.does(m.Over(serials=[3]))
    assert listening.until(m.Done).outcome == "ended"
    assert [executed.frames for executed in listening.executed] == [0]
    listening.wake(4)
    assert not listening.lent
    listening.does(m.Over(serials=[4]))
    assert 4 not in listening.leases.machine.leases, "the compute thread never knew of it"


def test_a_request_without_commands_whose_instance_is_gone_ends(listening: Serving) -> None:
    """That it gave none is said with the next wake, which may be later."""
    listening.heard(listening.hear, e.Detached("a"))
    listening.does(m.Over(serials=[3]))
    assert listening.until(m.Done).outcome == "revoked"
    listening.names = "b"


def test_commands_in_a_request_that_is_said_to_have_given_none_end_its_instance(listening: Serving) -> None:
    """Though that is heard while the compute thread still serves it."""
    listening.say(3, 1, wire.DOWNLOAD, 7, 1, 0, -1)
    later = listening.while_it_listens(m.Over(serials=[3]))
    listening.hear_out()
    later.join()
    listening.run()
    assert [executed.frames for executed in listening.executed] == [1]
    assert listening.until(Violated).text == "commands in a request that is said to have given none"
    assert listening.until(m.Done).serial == 3


def test_who_sends_no_first_frame_is_idle(warm: Serving) -> None:
    """And is heard by the gate from then on."""
    machine = warm.leases.machine
    machine._state.turn_s = 0.01
    warm.wake(3)
    began_s = machine.leases[3].since_s
    warm.hear_out()
    assert not warm.lent
    (executed,) = warm.executed
    assert (executed.frames, executed.idle_s < WAIT_S / 2) == (0, True)
    assert machine.leases[3].since_s == began_s
    assert machine.next_deadline_s == began_s + 0.01
    warm.does(e.Tick())
    assert warm.until(m.Idle).serial == 3
    warm.compute._turn_s = 0.01
    warm.frame(3, 1, wire.DOWNLOAD, 7, 1, 0, -1)
    assert warm.until(m.Busy).serial == 3
    assert warm.replies(2) == [[wire.VALUE, 7, ONES], [wire.ACK, 3, 1]]
    warm.does(m.Revoke(serial=3))


def test_who_sends_frames_for_longer_than_a_turn_is_heard_on(listening: Serving) -> None:
    listening.leases.machine._state.turn_s = 0.0
    listening.compute._turn_s = 0.2
    listening.say(3, 1, wire.DOWNLOAD, 7, 1, 0, -1)
    later = listening.while_it_listens(e.Tick())
    listening.hear_out()
    later.join()
    (executed,) = listening.executed
    assert (executed.frames, executed.idle_s >= 0.2) == (1, True)
    listening.does(m.Revoke(serial=3))


def test_a_turn_is_lost_before_the_first_frame(listening: Serving) -> None:
    listening.does(m.Pause(serial=3))
    assert (state(listening, 3), listening.lent) == (LeaseState.PAUSED, False)
    listening.does(m.Turn(serial=3))
    assert state(listening, 3) is LeaseState.RUNNING
    listening.does(m.Revoke(serial=3))
    assert listening.until(m.Done).outcome == "revoked"


def test_what_was_ordered_before_does_not_wait_for_a_first_frame(warm: Serving) -> None:
    warm.orders.give(None)
    warm.woken(3, "a")
    assert (warm.lent, warm.orders.idle) == (True, False)
    assert warm.orders.next_item() is None
    warm.does(m.Revoke(serial=3))
    assert warm.until(m.Done).outcome == "revoked"


def test_a_connection_that_cannot_be_had_is_heard_by_the_gate(world: Serving) -> None:
    for serial in (1, 2):
        world.wake(serial, "b")
        assert (world.loans, world.orders.items.empty()) == ([], True)
        world.frame(serial, 1, wire.DOWNLOAD, 7, 0, 0, -1, metas=META if serial == 1 else (), name="b")
        world.frame(serial, 2, wire.END, 9, wire.END_QUIET, name="b")
        assert world.until(m.Done).outcome == "ended"


def test_a_turn_is_lost_while_it_listens(world: Serving) -> None:
    """What comes then waits at the gate, in order, and is executed with the next turn."""
    world.wake(1)
    later = world.while_it_listens(m.Pause(serial=1))
    world.say(1, 2, wire.DOWNLOAD, 8, 1, 0, -1)
    world.frame(1, 1, wire.DOWNLOAD, 7, 0, 0, -1, metas=META)
    later.join()
    world.run()
    assert state(world, 1) is LeaseState.PAUSED
    assert not world.lent
    (executed,) = world.executed
    assert (executed.heard, executed.idle_s < WAIT_S / 2) == (1, True)
    assert [reply[:2] for reply in world.replies(4)] == [[wire.VALUE, 7], [wire.ACK, 1], [wire.VALUE, 8], [wire.ACK, 1]]
    world.heard(world.hear, e.Heard("a", msgpack.packb([1, 5, 3, [[], []], [wire.DOWNLOAD, 9, 1, 0, -1]])))
    assert world.until(m.WantsTurn).serial == 1
    world.say(1, 4, wire.END, 9, wire.END_QUIET)
    world.does(m.Turn(serial=1))
    assert world.until(m.Done).outcome == "ended"
    assert world.replies(2) == [[wire.VALUE, 9, ONES], [wire.ACK, 1, 3]]


def test_a_frame_that_is_here_already_waits_for_an_order(world: Serving) -> None:
    """Orders are not passed over by an instance that never stops sending."""
    world.wake(1)
    world.say(1, 2, wire.DOWNLOAD, 8, 1, 0, -1)
    world.heard(world.hear, e.Heard("a", msgpack.packb([1, 5, 1, [META, []], [wire.DOWNLOAD, 7, 0, 0, -1]])))
    world.orders.give(None)  # an order, whichever
    world.compute.carry_out(world.orders.items.get_nowait())
    assert world.orders.items.get_nowait() is None
    world.heard(lambda: None)
    assert [executed.heard for executed in world.executed] == [0]
    assert not world.lent
    assert world.replies(2) == [[wire.VALUE, 7, ZEROS], [wire.ACK, 1, 1]]
    world.does(m.Revoke(serial=1))
    assert world.until(m.Done).outcome == "revoked"


@pytest.mark.parametrize(
    ("serial", "number", "secret", "complaint"),
    [
        (1, 3, 5, "frame 3 after frame 1"),
        (1, 1, 5, "frame 1 after frame 1"),
        (1, 2, 6, "a frame under lease 1, which is not this instance's"),
    ],
)
def test_what_is_not_the_next_frame_is_judged_by_the_gate(
    world: Serving, serial: int, number: int, secret: int, complaint: str
) -> None:
    world.wake(1)
    world.say(serial, number, wire.DOWNLOAD, 8, 1, 0, -1, secret=secret)
    world.frame(1, 1, wire.DOWNLOAD, 7, 0, 0, -1, metas=META)
    assert world.until(Violated).text == complaint
    assert world.until(m.Done).outcome == "violated"
    assert world.replies(2)[0] == [wire.VALUE, 7, ZEROS]
    assert [executed.heard for executed in world.executed] == [0]


def test_a_frame_that_cannot_be_executed_ends_its_instance(world: Serving) -> None:
    world.wake(1)
    world.say(1, 2, wire.DOWNLOAD, 8, 1, 999, -1)
    world.frame(1, 1, 0, 1, 7, metas=META, keys=ADD)
    assert world.until(Violated).text == "geometry 999 was not defined"
    assert world.until(m.Done).outcome == "violated"
    assert not world.lent


def test_bytes_that_are_no_messages_end_the_loan(world: Serving) -> None:
    world.wake(1)
    world.ours.sendall(b"\x01\x01a")
    world.frame(1, 1, wire.DOWNLOAD, 7, 0, 0, -1, metas=META)
    assert (world.loans[0].over, world.loans[0].trouble) == (True, "a message of several parts")
    assert not world.lent
    world.does(m.Revoke(serial=1))


def test_an_instance_that_hangs_up_ends_the_loan(world: Serving) -> None:
    world.wake(1)
    world.ours.close()
    world.frame(1, 1, wire.DOWNLOAD, 7, 0, 0, -1, metas=META)
    assert (world.loans[0].over, world.loans[0].trouble) == (True, None)
    assert not world.lent
    world.does(e.Detached("a"))
    assert world.until(m.Done).outcome == "revoked"
    world.names = "b"


def test_more_frames_than_may_wait_are_the_gates_to_judge(world: Serving) -> None:
    world.wake(1)
    for number in range(2, 2 + wire.WINDOW_FRAMES + 1):
        world.say(1, number, wire.SYNC, number)
    world.frame(1, 1, wire.SYNC, 1)
    assert world.until(Violated).text == f"more than {wire.WINDOW_FRAMES} frames without acknowledgement"


def test_who_gives_nothing_for_a_while_is_idle_since_then(world: Serving) -> None:
    world.compute._turn_s = 0.05
    world.wake(1)
    before_s = world.leases.machine.leases[1].since_s
    world.frame(1, 1, wire.SYNC, 1)
    (executed,) = world.executed
    assert 0.05 <= executed.idle_s < WAIT_S
    lease = world.leases.machine.leases[1]
    assert before_s <= lease.since_s <= world.leases.machine._state.now_s - executed.idle_s
    assert not world.lent
    world.does(m.Revoke(serial=1))


def test_a_reply_that_finds_no_room_is_left_to_the_loop(world: Serving) -> None:
    """The rest of it; and the instance is not heard before it has gone."""
    world.ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    sent = 0
    world._theirs.setblocking(False)
    try:
        while True:
            sent += world._theirs.send(bytes(100))
    except BlockingIOError:
        pass
    world.wake(1)
    world.say(1, 2, wire.DOWNLOAD, 8, 1, 0, -1)
    world.frame(1, 1, wire.DOWNLOAD, 7, 0, 0, -1, metas=META)
    assert zmtp.framed(world.loans[0].unsent) != b"\0\0"
    assert world.loans[0].over
    assert [executed.heard for executed in world.executed] == [0]
    world.does(m.Revoke(serial=1))


def test_which_frame_follows() -> None:
    header = FrameHeader(3, 5, 7)
    frame = msgpack.packb([3, 5, 8, [[], []], []])
    assert follows(frame, header, 1)
    assert not follows(frame, header, 2)
    assert not follows(b"\xc1", header, 1)
    assert not follows(b"", header, 1)
