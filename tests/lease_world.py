"""The world of a machine of leases, played: a controller, a store, instances, copies and a compute thread."""

import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
from lease_compute import SECRET, Compute, Listening, Tenant
from lease_memory import POOLS, WRONG, Board, Coming, Ledger, Memory, Stage
from lease_store import Store

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.gate import FrameHeader, read_header
from dormouse.core.decisions.leases.held import LeaseState
from dormouse.core.decisions.leases.machine import Machine
from dormouse.core.decisions.leases.wake import Sources
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire


@dataclass
class Seat:
    """A lease as the controller knows it."""

    serial: int
    instance: str
    turn: bool = True
    wants: bool = False
    revoked: bool = False


@dataclass
class Sender:
    """A lease as its instance knows it."""

    instance: str
    number: int = 0
    acknowledged: int = 0
    ended: bool = False
    refused: bool = False


class World:
    """Plays all but the machine, and sees to it that everybody keeps the rules."""

    def __init__(self, pool: str, turns: int, share: bool) -> None:
        books = POOLS[pool]()
        self.capacity, self.turns = books.capacity, turns
        self.machine = Machine(books, share=share, turns=turns, turn_s=1.0)
        self.now_s = 0.0
        self._numbers = itertools.count(1000)
        self.store = Store(self)
        self.posts: deque[Callable[[], None]] = deque()  # what other threads have for the executor's
        self.from_store: deque[m.Manifest | m.Dropped | m.Placed | m.PlaceRefused] = deque()
        self.from_controller: deque[e.Event] = deque()
        self.to_controller: deque[o.Effect] = deque()
        self.boards: list[Board] = []
        self._events: deque[e.Event] = deque()
        self._handling = False
        self.compute = Compute(self, books, share)
        self.ledger = Ledger()
        # what the controller knows
        self.seats: dict[int, Seat] = {}
        self._serials = itertools.count(1)
        # what instances know
        self.attached: set[str] = set()
        self.hostile: set[str] = set()
        self.gone: set[str] = set()  # said to the machine, or on the way
        self.senders: dict[int, Sender] = {}
        self.lent: dict[str, deque[bytes]] = {}  # by instance: what the compute thread is to hear, and has not taken
        # what has been, by serial
        self.wakes: dict[int, m.Wake] = {}
        self.given: Counter[int] = Counter()  # frames to the compute thread
        self.executed: Counter[int] = Counter()
        self.dones: Counter[int] = Counter()
        self.copied: Counter[int] = Counter()
        self.begun: set[int] = set()
        self.overs: set[int] = set()
        self.revoked: set[int] = set()
        self.no_room: set[int] = set()  # the store or the device had none for what the lease had made
        self.spilled: set[int] = set()  # that have left once
        self.turn: set[int] = set()  # as the machine has been told
        self.idle: set[int] = set()  # as it has told
        self.expelled: set[str] = set()
        self.pins: list[tuple[int, list[tuple[int, int]], int]] = []  # (segment, extents, value)
        # preloads, by serial
        self.last_ahead = 0  # that has begun
        self.given_up: set[int] = set()  # before they have
        self.preloading = False  # as the controller knows
        self.preloads: Counter[str] = Counter()  # by outcome

    def fresh(self) -> int:
        return next(self._numbers)

    # --- the executor's thread

    def later(self, work: Callable[[], None]) -> None:
        self.posts.append(work)

    def hear(self, instance: str, data: bytes) -> None:
        """What it has sent: the compute thread hears it itself, or the gate."""
        if instance in self.lent:
            self.lent[instance].append(data)
        else:
            self.handle(e.Heard(instance, data))

    def take_back(self, instance: str) -> None:
        for data in self.lent.pop(instance):
            self.handle(e.Heard(instance, data))

    def post(self, event: e.Event) -> None:
        self.later(partial(self.handle, event))

    def hear_posts(self) -> None:
        while self.posts:
            self.posts.popleft()()

    def handle(self, event: e.Event) -> None:
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        while self._events:
            first = self._events.popleft()
            if isinstance(first, e.MayWrite | e.Relieve):
                assert not self.compute.orders.asked, "two questions at once"
            self.compute.orders.heard(first)
            self._before(first)
            self.now_s += 0.001
            effects = self.machine.handle(first, self.now_s)
            self.machine.check()
            for effect in effects:
                self._perform(effect)
            if isinstance(first, e.MayWrite):
                assert not self.compute.orders.asked, "no answer"
            stats = self.machine.stats()
            total = (
                stats.weights_nbytes + stats.kv_nbytes + stats.lost_nbytes + stats.activation_nbytes + stats.free_nbytes
            )
            assert total == self.capacity
            occupied_nbytes = self.machine.residency.occupied_nbytes
            assert stats.weights_nbytes + stats.lost_nbytes == occupied_nbytes == self.ledger.nbytes
            assert self.ledger.limit_nbytes in (0, self.capacity - occupied_nbytes), "room that nobody was told of"
        self._handling = False

    def _before(self, event: e.Event) -> None:
        match event:
            case e.WakeAsked(wake=wake):
                self.turn.add(wake.lease.serial)
                self.wakes[wake.lease.serial] = wake
            case m.Turn(serial=serial):
                self.turn.add(serial)
            case m.Pause(serial=serial):
                self.turn.discard(serial)
                self.idle.discard(serial)
            case m.Revoke(serial=serial):
                self.turn.discard(serial)
                self.revoked.add(serial)
            case m.Over(serials=serials):
                self.turn -= set(serials)
                books = self.machine._state
                waiting = {first.wake.lease.serial for first in books.coming if isinstance(first, e.WakeAsked)}
                self.overs |= set(serials) & (books.leases.keys() | waiting)
            case e.Detached(instance=instance):
                self.attached.discard(instance)
            case _:
                pass

    def _perform(self, effect: o.Effect) -> None:
        match effect:
            case o.Skip(serial=serial):
                self.compute.orders.skipped.add(serial)
                for board in self.boards:
                    if board.serial == serial:
                        self._give_up(board)
            case o.Reply(instance=instance, message=message):
                for reply in wire.replies(message):
                    self._replied(instance, reply)
            case o.Expel(instance=instance):
                assert instance in self.hostile, f"{instance} did nothing wrong: {effect.text}"
                assert instance not in self.expelled, "expelled twice"
                self.expelled.add(instance)
                self.to_controller.append(effect)
            case m.Done():
                self._done(effect)
                self.to_controller.append(effect)
            case m.Idle(serial=serial):
                assert serial in self.turn - self.idle
                self.idle.add(serial)
            case m.Busy(serial=serial):
                assert serial in self.idle
                self.idle.discard(serial)
            case m.WantsTurn(serial=serial):
                assert serial not in self.turn
                self.to_controller.append(effect)
            case m.Pressed() | m.Metered():
                pass
            case m.AskPlace() | m.Written() | m.LetGo() | m.FirstUse():
                self.store.heard(effect)
            case o.ToRuntimeOf() | o.OpenRuntime():
                raise AssertionError("no language model is here")
            case o.StopBringing(serial=serial):
                self.stop_ahead(serial)
            case m.Preloaded() | m.Unloaded():
                self.to_controller.append(effect)
            case o.Listen(begin=begin) if begin.serial % 4 == 0:
                self._events.append(e.NotLent(begin.serial))
            case o.Listen(begin=begin):
                self._order(begin)
                self.compute.orders.give(begin)
                self.lent[begin.instance] = deque()
                self.compute.orders.items.put(Listening(begin))
            case _:
                self._order(effect)
                self.compute.orders.give(effect)

    def _order(self, order: o.Order | o.ComputeAnswer) -> None:
        match order:
            case o.Arrange():
                self.ledger.arrange(order)
            case o.Bring(missing=missing):
                self.ledger.give([(offset, nbytes) for _, offset, nbytes in missing], self.memory.paged)
            case o.CopyOut(serial=serial, spill=True):
                self.spilled.add(serial)
            case o.Close(brought=brought):
                self.ledger.give([(offset, nbytes) for _, _, offset, nbytes in brought], self.memory.paged)
            case o.Execute(serial=serial, data=data):
                wake = self.wakes[serial]
                self.given[serial] += 1
                assert read_header(data) == FrameHeader(serial, SECRET, self.given[serial])
                assert serial in self.turn, "a frame without a turn"
                assert not self.dones[serial]
                assert wake.instance in self.attached - self.expelled
                assert serial in self.begun
            case o.Begin(serial=serial, instance=instance) | o.Return(begin=o.Begin(serial=serial, instance=instance)):
                begin = order if isinstance(order, o.Begin) else order.begin
                assert (serial in self.begun) == isinstance(order, o.Return)
                self.begun.add(serial)
                assert instance == self.wakes[serial].instance
                assert begin.refused or self.machine.residency.seated(instance), "a turn without a seat"
                self.ledger.give([(offset, nbytes) for _, offset, nbytes in begin.missing], self.memory.paged)
            case _:
                pass

    def _done(self, done: m.Done) -> None:
        serial = done.serial
        wake = self.wakes[serial]
        self.dones[serial] += 1
        assert self.dones[serial] == 1, "two ends"
        assert serial not in self.machine.leases
        assert serial not in self.compute.leases
        self.turn.discard(serial)
        match done.outcome:
            case "ended" if serial not in self.overs:
                assert self.senders[serial].ended
                honest = wake.instance not in self.hostile
                assert not honest or self.executed[serial] == self.given[serial] == self.senders[serial].number
                assert not honest or not self.senders[serial].refused
            case "ended":
                pass
            case "revoked":
                assert serial in self.revoked | self.no_room | self.spilled or wake.instance in self.gone
            case _:
                assert wake.instance in self.expelled
        if not self.memory.torn:
            assert done.copied_nbytes == self.copied[serial]

    @property
    def memory(self) -> Memory:
        return self.compute.memory

    def _replied(self, instance: str, reply: list[Any]) -> None:
        serial = reply[1]
        sender = self.senders[serial]
        if reply[0] == wire.ACK:
            assert reply[2] == sender.acknowledged + 1
            sender.acknowledged += 1
        elif sender.instance == instance:
            sender.refused = True
            if reply[3] == wire.SEAT_LOST:
                assert serial in self.no_room | self.spilled or serial not in self.begun
                self.no_room.add(serial)

    # --- copies

    def begin_copies(self, board: Board) -> None:
        self.boards.append(board)

    def stop_copies(self, board: Board, cancel: bool) -> None:
        self._give_up(board)
        board.stopped, board.cancelled = True, cancel

    def _give_up(self, board: Board) -> None:
        lost = [coming for coming in board.segments.values() if coming.stage is Stage.WANTED]
        for coming in lost:
            coming.stage = Stage.LOST
        if lost:
            self.handle(e.Came(board.serial, [coming.segment for coming in lost], lost=True))

    def begin_ahead(self, board: Board) -> None:
        """What nobody has asked for."""
        self.last_ahead = board.serial
        if board.serial in self.given_up:
            self.given_up.discard(board.serial)
            self.handle(e.Brought(board.serial, e.WakeRemains(lost=list(board.segments))))
            return
        self.boards.append(board)
        self._settle_ahead(board)

    def stop_ahead(self, serial: int) -> None:
        board = next((each for each in self.boards if each.serial == serial), None)
        if board is None:
            if serial < self.last_ahead:
                self.given_up.add(serial)
            return
        for coming in board.segments.values():
            if coming.open:  # the chunk that is being copied ends, and no other begins
                coming.stage = Stage.CANCELLED
        self._settle_ahead(board)

    def _settle_ahead(self, board: Board) -> None:
        if board not in self.boards or any(coming.open for coming in board.segments.values()):
            return
        self.boards.remove(board)
        there = [each.segment for each in board.segments.values() if each.stage is Stage.THERE]
        lost = [each.segment for each in board.segments.values() if each.stage is not Stage.THERE]
        self.handle(e.Brought(board.serial, e.WakeRemains(there, lost, Sources())))

    def _came_ahead(self, board: Board, segment: int) -> None:
        if board in self.boards:  # else it was given up, and what has come by then is known
            self.handle(e.Came(board.serial, [segment]))
            self._settle_ahead(board)

    def copies(self) -> list[tuple[Board, Coming]]:
        return [(board, coming) for board in self.boards for coming in board.segments.values() if coming.open]

    def copy(self, board: Board, coming: Coming, lose: bool = False) -> None:
        """One goes on, or a source fails."""
        if board.ahead and coming.stage is Stage.WANTED and lose:
            coming.stage = Stage.LOST
            self._settle_ahead(board)
        elif coming.stage is Stage.WANTED and lose:
            coming.stage = Stage.LOST
            self.handle(e.Came(board.serial, [coming.segment], lost=True))
        elif coming.stage is Stage.WANTED:
            coming.stage = Stage.COPYING
            self.memory.write(coming.offset, coming.nbytes, WRONG)
        elif board.cancelled and lose:
            coming.stage = Stage.CANCELLED
        else:
            self.memory.write(coming.offset, coming.nbytes, self.store.values[coming.segment])
            coming.stage = Stage.THERE
            if board.ahead:
                self.later(partial(self._came_ahead, board, coming.segment))
            elif not board.cancelled:
                self.post(e.Came(board.serial, [coming.segment]))

    # --- what can go on by itself

    def moves(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        if self.compute.able():
            found.append(self.compute.go)
        if self.posts:
            found.append(lambda: self.posts.popleft()())
        if self.from_store:
            found.append(lambda: self.handle(self.from_store.popleft()))
        if self.from_controller:
            found.append(lambda: self.handle(self.from_controller.popleft()))
        if self.to_controller:
            found.append(lambda: self._controller_hears(self.to_controller.popleft()))
        found += [partial(self.store.answer, ticket, False) for ticket in self.store.asked]
        found += [partial(self.copy, *each) for each in self.copies()]
        return found

    def settle(self) -> None:
        """Until nobody has anything to do."""
        for _ in range(5000):
            moves = self.moves()
            if not moves:
                return
            moves[0]()
        raise AssertionError("it does not come to rest")

    # --- the controller

    def _controller_hears(self, said: o.Effect) -> None:
        match said:
            case m.Done(serial=serial):
                self.seats.pop(serial, None)
            case m.WantsTurn(serial=serial):
                if (seat := self.seats.get(serial)) is not None:
                    assert not seat.turn
                    seat.wants = True
            case o.Expel(instance=instance):
                self.forget(instance)
            case m.Preloaded(outcome=outcome):
                assert self.preloading, "nobody has asked for it"
                self.preloading = False
                self.preloads[outcome] += 1
            case _:
                pass

    def preload(self, instance: str, worth: dict[str, float]) -> None:
        if not self.preloading:
            self.preloading = True
            model = self.store.models.get(instance)
            asked = m.Preload(
                instance=instance, version=model.version if model is not None else 0, worth=worth, peers=[]
            )
            self.from_controller.append(e.PreloadAsked(asked, e.WakeRates(1.0, 0.0)))

    def forget(self, instance: str) -> None:
        """It is gone."""
        if instance in self.gone:
            return
        self.gone.add(instance)
        for seat in self.seats.values():
            if seat.instance == instance:
                self.revoke(seat)
        self.from_controller.append(e.Detached(instance))

    def free_turns(self) -> int:
        return self.turns - sum(seat.turn for seat in self.seats.values())

    def wakeable(self) -> list[str]:
        leased = {seat.instance for seat in self.seats.values()}
        return sorted(self.attached - leased - self.gone - self.expelled)

    def wake(self, instance: str, newest: bool, wish_nbytes: int, worth: dict[str, float]) -> int:
        serial = next(self._serials)
        model = self.store.models.get(instance)
        wake = m.Wake(
            lease=m.Lease(gpu=0, epoch=1, serial=serial, secret=SECRET),
            instance=instance,
            version=model.version if newest and model is not None else 0,
            worth=worth,
            peers=[],
            activation_nbytes=wish_nbytes,
        )
        self.seats[serial], self.senders[serial] = Seat(serial, instance), Sender(instance)
        self.from_controller.append(e.WakeAsked(wake, e.WakeRates(1.0, 0.0)))
        return serial

    def running(self) -> list[Seat]:
        """Who may lose the turn: the executor has said that it has it."""
        told = {event.serial for event in self.from_controller if isinstance(event, m.Turn | m.Pause)}
        leases = self.machine.leases
        return [
            seat
            for serial, seat in self.seats.items()
            if seat.turn
            and serial not in told
            and serial in leases
            and leases[serial].state is LeaseState.RUNNING
            and not self.changed(seat)  # a lease that has left goes on with the model it began with
        ]

    def changed(self, seat: Seat) -> bool:
        """Its model is not the one any more that it began with."""
        instance, model = self.machine._state.instances.get(seat.instance), self.store.models.get(seat.instance)
        return instance is not None and model is not None and instance.manifest.version != model.version

    def pause(self, seat: Seat) -> None:
        seat.turn = False
        self.from_controller.append(m.Pause(serial=seat.serial))

    def give_turn(self, seat: Seat) -> None:
        seat.turn, seat.wants = True, False
        self.from_controller.append(m.Turn(serial=seat.serial))

    def revoke(self, seat: Seat) -> None:
        if not seat.revoked:
            seat.revoked = True
            self.from_controller.append(m.Revoke(serial=seat.serial))

    def unused(self) -> list[Seat]:
        """Whose instances can say that they gave the GPU nothing."""
        return [seat for serial, seat in self.seats.items() if not self.senders[serial].number and not seat.revoked]

    def over(self, seat: Seat) -> None:
        del self.seats[seat.serial]
        self.senders[seat.serial].ended = True
        self.from_controller.append(m.Over(serials=[seat.serial]))

    # --- instances

    def attach(self, name: str) -> None:
        self.attached.add(name)
        manifest = m.Manifest(instance=name, version=0, entries=[], segments=[])
        self.compute.tenants[name] = Tenant(name, manifest)
        self.handle(e.InstanceAttached(name, "t"))
        self.machine._state.instances[name].uses = True  # as after its first lease that had commands

    def sending(self) -> list[Seat]:
        """Who may send a frame."""
        return [
            seat
            for serial, seat in self.seats.items()
            if seat.instance in self.attached - self.gone - self.expelled
            and not (sender := self.senders[serial]).ended
            and not sender.refused
            and sender.number - sender.acknowledged < wire.WINDOW_FRAMES
        ]

    def send(self, seat: Seat, commands: list[list[Any]]) -> None:
        sender = self.senders[seat.serial]
        sender.number += 1
        sender.ended = sender.ended or any(command[0] == "end" for command in commands)
        data = msgpack.packb([seat.serial, SECRET, sender.number, [[], []], commands])
        self.hear(seat.instance, data)

    # --- the end

    def play_out(self) -> None:
        """Everybody comes to his end, if turns are given to those that want them."""
        for _ in range(200):
            self.settle()
            if not self.seats:
                break
            for seat in list(self.seats.values()):
                if seat.instance in self.hostile:
                    self.revoke(seat)
            for seat in self.sending():
                self.send(seat, [["read", 0, 0], ["end", True]])
            self.settle()
            for seat in [seat for seat in self.seats.values() if seat.wants and not seat.turn]:
                if self.free_turns() > 0:
                    self.give_turn(seat)
        assert not self.seats, f"they wait for ever: {self.machine.leases}"
        self.settle()
        books = self.machine._state
        assert not self.machine.leases
        assert not books.coming
        assert books.preload is None
        assert not self.preloading, "no word of a preload"
        assert not any(board.ahead for board in self.boards)
        assert not self.given_up
        assert not self.store.asked
        assert not self.store.placed
        assert not self.compute.leases
        assert not self.compute.orders.asked
        for serial, wake in self.wakes.items():
            without_trace = serial in self.overs and serial not in self.begun
            assert self.dones[serial] == (not without_trace), f"no Done of {wake}"
        while self.pins:
            self.unpin(0)
        for name in sorted(self.attached):
            self.forget(name)
        for name in sorted(self.store.models):
            self.store.drop(name)
        self.settle()
        assert not self.attached
        assert self.machine.residency.occupied_nbytes == 0
        assert self.compute.now_nbytes == 0
        self.compute._arrange()

    # --- other GPUs

    def pin(self, segments: list[int]) -> None:
        for segment, extents in self.machine.residency.pin(segments):
            value = self.memory.read_extents(extents)
            assert value == self.store.values[segment], f"segment {segment} is not here"
            self.pins.append((segment, extents, value))

    def unpin(self, index: int) -> None:
        segment, extents, value = self.pins.pop(index)
        assert self.memory.read_extents(extents) == value, f"segment {segment} has changed while another GPU read it"
        self.handle(e.Forgotten(self.machine.residency.let_go([segment])))
