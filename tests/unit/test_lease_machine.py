"""The machine of leases against a world that is played: a controller, a store, instances, copies and a compute thread
that keep what they may do, in any order. No device, no torch, no thread: memory is a list of units, each of which knows
whose bytes it has.
"""

import sys
from functools import partial
from typing import Any, Final

import msgpack
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from lease_compute import SECRET
from lease_memory import POOLS, SEGMENTS, UNIT
from lease_world import Sender, World

from dormouse.core.decisions.leases import events as e
from dormouse.schemas import messages as m

PROGRAMS: Final[list[list[list[Any]]]] = [
    [],
    [["read", 0, 0], ["read", 1, 0]],
    [["read", 2, 0], ["read", 3, 0]],
    [["write", 0, 0]],
    [["write", 1, 0], ["read", 1, 0]],
    [["write", 2, 1]],
    [["create", 0, 1]],
    [["create", 0, 2], ["write", 5, 0]],
    [["create", 0, 3]],
    [["free", 1, 0]],
    [["create", 0, 1], ["end", True]],
    [["read", 0, 0], ["end", False]],
    [["write", 0, 0], ["end", True]],
    [["end", True]],
]

NAMES: Final = "abcd"
CHOICE = st.integers(0, 11)
MODEL = st.lists(st.integers(0, SEGMENTS - 1), min_size=1, max_size=4, unique=True)


class Leases(RuleBasedStateMachine):
    """Everybody does what he likes, as far as he may."""

    world: World

    @initialize(
        pool=st.sampled_from(sorted(POOLS)),
        turns=st.sampled_from([1, 2]),
        share=st.booleans(),
        models=st.lists(MODEL, min_size=4, max_size=4),
    )
    def begin(self, pool: str, turns: int, share: bool, models: list[list[int]]) -> None:
        self.world = World(pool, turns, share)
        for name, segments in zip(NAMES, models, strict=True):
            self.publish(name, segments)
            self.world.attach(name)

    def publish(self, name: str, segments: list[int]) -> None:
        self.world.store.publish(name, {number: 100 + segment for number, segment in enumerate(segments)})

    def teardown(self) -> None:
        if hasattr(self, "world") and sys.exception() is None:
            self.world.play_out()

    @rule(choices=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 999)), min_size=10, max_size=40))
    def it_goes_on(self, choices: list[tuple[int, int]]) -> None:
        """Mostly by itself; and now and then the controller and the instances do something."""
        world = self.world
        for kind, which in choices:
            found = world.moves() if kind else []
            found = found or [
                partial(act, which // 16)
                for act in (self.wake, self.pause, self.give_turn, self.send, self.lose, self.preload)
            ]
            found[which % len(found)]()

    @rule()
    def it_comes_to_rest(self) -> None:
        self.world.settle()

    @rule(seconds=st.sampled_from([0.1, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds
        self.world.handle(e.Tick())

    # --- the controller and the instances

    def wake(self, which: int) -> None:
        names = self.world.wakeable()
        if names and self.world.free_turns() > 0:
            worth = {name: float(1 + (which + number) % 3) for number, name in enumerate(NAMES)}
            self.world.wake(names[which % len(names)], bool(which % 3), which % 4 * UNIT, worth)

    def preload(self, which: int) -> None:
        """Or what comes is given up."""
        names = sorted(self.world.attached - self.world.gone)
        if self.world.seats and which % 4:
            return  # it would be refused
        if which % 8 == 7:
            self.world.from_controller.append(m.StopPreload())
        elif names:
            worth = {name: float(1 + (which + number) % 3) for number, name in enumerate(NAMES)}
            name = names[which % len(names)]
            self.world.preload(name, worth | {name: 9.0 if which % 3 else 1.0})

    def pause(self, which: int) -> None:
        if seats := self.world.running():
            self.world.pause(seats[which % len(seats)])

    def give_turn(self, which: int) -> None:
        seats = [seat for seat in self.world.seats.values() if seat.wants and not seat.turn]
        if seats and self.world.free_turns() > 0:
            self.world.give_turn(seats[which % len(seats)])

    def send(self, which: int) -> None:
        if seats := self.world.sending():
            self.world.send(seats[which % len(seats)], PROGRAMS[which // 3 % len(PROGRAMS)])

    def lose(self, which: int) -> None:
        if (copies := self.world.copies()) and which % 3 == 0:
            self.world.copy(*copies[which % len(copies)], lose=True)

    # --- what happens to them

    @rule(kind=st.integers(0, 5), which=st.integers(0, 999), segments=MODEL)
    def something_happens(self, kind: int, which: int, segments: list[int]) -> None:
        world = self.world
        match kind:
            case 0 if world.seats:
                world.revoke(list(world.seats.values())[which % len(world.seats)])
            case 1 if unused := world.unused():
                world.over(unused[which % len(unused)])
            case 2 if world.store.asked:
                world.store.answer(sorted(world.store.asked)[which % len(world.store.asked)], refuse=True)
            case 3:
                world.compute.refuses = True
            case 4:
                self.hostile(which)
            case 5:
                self.dies(which, segments)
            case _:
                pass

    def hostile(self, which: int) -> None:
        """An instance sends what it should not: of any lease, with any secret or number; or no frame at all."""
        world = self.world
        if names := sorted(world.attached - world.gone):
            name, which = names[which % len(names)], which // len(names)
            world.hostile.add(name)
            serial, which = which % (len(world.senders) + 1), which // (len(world.senders) + 1)
            world.senders.setdefault(serial, Sender(""))
            secret, number = SECRET + (which % 3 > 1), which % 4
            own = [seat.serial for seat in world.sending() if seat.instance == name]
            if own and which % 2:
                serial, secret, number = own[0], SECRET + 1, world.senders[own[0]].number + 1
            command = ["bad"] if which % 2 else ["read", 0, 0]
            data = msgpack.packb([serial, secret, number, [[], []], [command]])
            world.hear(name, data[: len(data) // 4] if which % 5 == 4 else data)

    def dies(self, which: int, segments: list[int]) -> None:
        """And another takes its place; both are said by the controller and by the store, in any order."""
        world = self.world
        names = sorted(world.attached - world.gone)
        if not names:
            return
        name = names[which % len(names)]
        for part in (world.forget, world.store.drop) if which % 2 else (world.store.drop, world.forget):
            part(name)
        name = f"{name[0]}{len(world.gone)}"
        for part in (world.attach, partial(self.publish, segments=segments))[:: 1 if which % 3 else -1]:
            part(name)

    # --- the store and other GPUs

    @rule(which=CHOICE, segment=st.integers(0, SEGMENTS - 1), number=st.integers(0, 4), newer=st.booleans())
    def a_model_changes(self, which: int, segment: int, number: int, newer: bool) -> None:
        """By an upload, or only its order."""
        store = self.world.store
        if not (names := sorted(store.models)):
            return
        name = names[which % len(names)]
        entries = store.entries(name)
        paused = any(seat.instance == name and seat not in self.world.running() for seat in self.world.seats.values())
        if (
            newer and 100 + segment not in entries.values() and not paused
        ):  # a lease that has left goes on with the model it began with
            store.publish(name, entries | {number: 100 + segment})
        else:
            store.publish(name, entries, order=sorted(entries.values(), reverse=bool(number % 2)), newer=False)

    @rule(segments=MODEL)
    def another_gpu_reads(self, segments: list[int]) -> None:
        """And what one has read is let go."""
        world = self.world
        if len(world.pins) > 2:
            world.unpin(len(segments) % len(world.pins))
        world.pin([100 + segment for segment in segments])


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=150, stateful_step_count=60, derandomize=True, deadline=None)
