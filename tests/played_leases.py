"""A machine of leases with language models whose compute thread and runtimes are a script."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import structs

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases import reclaim, turns
from dormouse.core.decisions.leases.machine import Machine
from dormouse.core.decisions.memory.pools.pages import Pages
from dormouse.schemas import messages as m

MIB = 1 << 20
GRANULE = 2 * MIB
SEAT_IDLE_S = 100.0


class Played:
    """A machine with language models "a", "b", ..., whose compute thread and runtimes obey unless told not to. Those of
    ``shared`` are the same model, and one runtime, "g", may compute for them; others have runtimes of their names.
    Those of ``adapters`` have an adapter of their own, too, of a granule. With
    ``tenants``, each has one of its own ("t-a", ...), with these ``quotas``.
    """

    def __init__(
        self,
        granules: int = 8,
        models: Sequence[str] = "ab",
        nbytes: int = GRANULE,
        shared: Sequence[str] = "",
        turns: int = 1,
        adapters: Sequence[str] = "",
        offload: str = "asked",
        tenants: bool = False,
        quotas: dict[str, int] | None = None,
    ) -> None:
        pool = Pages([(GRANULE, granules)], 1 << 40)
        self.machine = Machine(pool, share=True, turns=turns, seat_idle_s=SEAT_IDLE_S, offload=offload, quotas=quotas)
        self.now_s = 0.0
        self.metered: list[m.Metered] = []
        self.held = self.counted_ms = self.gpu_us = 0
        self.serials = 0
        self.events: deque[Any] = deque()  # the first is being handled
        self.obeys = True
        self.answers: list[Any] = []  # of the compute thread's questions
        self.asks = False  # the compute thread waits for one
        self.owned: set[int] = set()  # leases that it lets go of even then
        self.closes: list[Any] = []  # that it has not come to
        self.told: dict[str, list[Any]] = {}  # by runtime, as all of these
        self.owes: dict[str, list[str]] = {}  # what it was told to give back
        self.controller: list[Any] = []
        self.pressed: list[m.Pressed] = []
        self.over: list[Any] = []  # instances that were told so of their leases
        self.kv: dict[str, list[int]] = {}
        self.idle: dict[str, int] = {}  # extents of those that are, the first ones
        self.reclaims: dict[str, int] = {}  # asked for, and not answered
        self.turn: set[str] = set()
        self.asked: set[str] = set()  # who waits for KV hears nothing else
        self.seat: set[str] = set()
        self.mapped: dict[str, set[int]] = {}  # granules that can only be read
        self.parts: dict[str, list[m.MemberLeaves]] = {}  # not answered
        self.slow = False  # to answer these
        self.comes = True  # what is missing
        for name in (*models, "g"):
            self.told[name], self.kv[name], self.idle[name], self.owes[name] = [], [], 0, []
            self.mapped[name], self.parts[name] = set(), []
        for number, name in enumerate(models):
            group, adapter = "g" if name in shared else "", name in adapters
            self.do(e.InstanceAttached(name, f"t-{name}" if tenants else "t", llm=True, group=group, adapter=adapter))
            self.model(name, 99 if name in shared else 100 + number, nbytes, 200 + number if adapter else 0)

    def model(
        self, name: str, segment: int, nbytes: int = GRANULE, adapter: int = 0, adapter_nbytes: int = GRANULE
    ) -> None:
        segments = [(segment, nbytes), *[(adapter, adapter_nbytes)] * bool(adapter)]
        entries = [
            m.Entry(storage=number, segment=segment, offset=0, nbytes=nbytes)
            for number, (segment, nbytes) in enumerate(segments, 1)
        ]
        self.do(m.Manifest(instance=name, version=1, entries=entries, segments=segments))

    def do(self, event: Any) -> None:
        """And all that follows from it, each event with its effects, as the executor does it."""
        self.asks |= isinstance(event, e.Relieve)
        self.events.append(event)
        if len(self.events) > 1:
            return
        while self.events:
            event = self.events[0]
            if isinstance(event, tuple):  # of a runtime: for any of its leases that there are by now
                runtime, message = event
                serials = (lease.serial for lease in self.machine.leases.values() if lease.runtime == runtime)
                serial = next(serials, None)
                event = None if serial is None else e.SaidByRuntime(serial, message)
            self.count()
            for effect in self.machine.handle(event, self.now_s) if event is not None else ():
                self.perform(effect)
            if isinstance(event, e.SaidByRuntime) and isinstance(event.message, m.Stepped) and self.serves(event):
                self.gpu_us += event.message.busy_us
            self.machine.check()
            self.check_stats()
            self.events.popleft()

    @property
    def due_s(self) -> float | None:
        """When a lease is to be looked at; statements of what was used are due all the time."""
        state = self.machine._state
        due = turns.next_deadline_s(state), reclaim.next_deadline_s(state)
        return min((due_s for due_s in due if due_s is not None), default=None)

    def serves(self, event: e.SaidByRuntime) -> bool:
        lease = self.machine.leases.get(event.serial)
        return lease is not None and bool(lease.runtime)

    def count(self) -> None:
        """What is there has been there since the last event."""
        pool, now_ms = self.machine.residency.pool, int(self.now_s * 1000)
        self.held += sum(pool.nbytes(segment) for segment in pool.segments()) * (now_ms - self.counted_ms)
        self.counted_ms = now_ms

    def check_stats(self) -> None:
        """All memory is told once, and all KV as such."""
        state, pool, stats = self.machine._state, self.machine.residency.pool, self.machine.stats()
        kv = [number for books in state.runtimes.values() for number in state.kv(books)]
        assert stats.kv_nbytes == sum(pool.nbytes(number) for number in kv)
        used_nbytes = stats.weights_nbytes + stats.kv_nbytes + stats.lost_nbytes
        assert used_nbytes + stats.activation_nbytes + stats.free_nbytes == pool.capacity

    def check_metered(self) -> None:
        """Nothing of what was held or computed is lost, or counted twice, whoever it was counted for."""
        self.count()
        stated = [*self.metered, *self.machine._state.meter.state(self.now_s)]
        assert sum(held.nbyte_ms for each in stated for held in each.held) == self.held
        assert sum(use.gpu_us for each in stated for use in each.uses) == self.gpu_us
        over = sum(each.gpu_us for each in self.controller if isinstance(each, m.Done))
        assert over + sum(lease.busy_us for lease in self.machine.leases.values()) == self.gpu_us

    def perform(self, effect: Any) -> None:
        match effect:
            case o.ToRuntimeOf(runtime=name, message=message):
                self.told[name].append(message)
                self.hear(name, message)
            case o.Mark(serial=serial, extents=extents):
                self.do(e.Marked(serial, extents))
            case o.Begin(missing=missing) if missing and not self.comes:
                pass
            case o.Begin(serial=serial, missing=missing) if missing:
                self.do(e.Came(serial, [segment for segment, _, _ in missing]))
            case o.Reply(instance=name, message=message):
                self.over.append((name, msgspec.msgpack.decode(message, type=m.ExecutorToLlm)))
            case o.Own(serial=serial):
                self.owned.add(serial)
                self.do(e.Owned(serial, [], e.WakeRemains()))
            case o.CopyOut(serial=serial, spill=True):
                self.do(e.CopiedOut(serial, True, [], e.Use()))
            case o.Close(serial=serial) if self.asks and serial not in self.owned:
                self.closes.append(effect)
            case o.Close(serial=serial):
                self.do(e.Closed(serial, [], [], [], [], e.Counts(), e.WakeRemains(), e.Use()))
            case o.ComputeAnswer(value=value):
                self.answers.append(value)
                self.asks = False
                for close in self.closes:
                    self.perform(close)
                self.closes.clear()
            case m.Pressed():
                self.pressed.append(effect)
            case m.Done() | m.Idle() | m.WantsTurn() | m.Unloaded():
                self.controller.append(effect)
            case m.Metered():
                self.metered.append(effect)

    def hear(self, name: str, message: Any) -> None:
        """As a runtime would."""
        match message:
            case m.SeatGiven():
                self.seat.add(name)
            case m.TurnBegins():
                self.turn.add(name)
            case m.KvGiven(extents=extents):
                self.kv[name] += [number for number, _ in extents]
                self.asked.discard(name)
                if self.obeys:
                    self.obey(name)
            case m.GranulesGiven(granules=granules, writable=False):
                self.mapped[name].update(granule.offset for granule in granules)
            case m.MemberLeaves(granules=granules, stays=stays) if granules or stays:
                self.parts[name].append(message)
                if self.obeys and not self.slow:
                    self.part(name)
            case m.TurnEnds() | m.SeatEnds():
                self.owes[name].append("turn" if isinstance(message, m.TurnEnds) else "seat")
                if self.obeys:
                    self.obey(name)
            case m.KvReclaim(nbytes=nbytes):
                self.reclaims[name] = nbytes
                if self.obeys:
                    self.give_back(name)

    def part(self, name: str) -> None:
        while self.parts[name]:
            message = self.parts[name].pop(0)
            self.mapped[name].difference_update(message.granules)
            self.say(name, m.MemberLeft(serial=message.serial))

    def obey(self, name: str) -> None:
        self.part(name)
        for owed in list(self.owes[name]) if name not in self.asked else ():
            if owed in self.owes[name] and owed == "turn":
                books = self.machine._state.runtimes.get(name)
                self.give_turn_back(name, wants=books is None or not books.lent)  # else it would have all of the time
            elif owed in self.owes[name]:
                self.leave(name)

    def dies(self, name: str) -> None:
        """The runtime's process."""
        for some in (self.seat, self.turn, self.asked):
            some.discard(name)
        for each in (self.kv, self.mapped, self.parts):
            each[name].clear()
        self.owes[name].clear()
        self.idle[name] = 0
        self.reclaims.pop(name, None)
        self.do(e.RuntimeGone(name))

    def give_turn_back(self, name: str, wants: bool = True) -> None:
        self.part(name)
        self.turn.discard(name)
        self.owes[name] = [owed for owed in self.owes[name] if owed != "turn"]
        self.say(name, m.TurnGivenBack(wants=wants))

    def leave(self, name: str) -> None:
        self.part(name)
        if name in self.turn:  # in the middle of a step, which is cut
            self.say(name, m.Stepped(busy_us=3, shares=self.shares(name)))
        self.seat.discard(name)
        self.turn.discard(name)
        self.kv[name].clear()
        self.mapped[name].clear()
        self.idle[name] = 0
        self.reclaims.pop(name, None)
        self.owes[name] = [owed for owed in self.owes[name] if owed != "seat"]
        self.say(name, m.SeatLeft())

    def step(self, name: str, idle: int = 0, recompute_us: int = 0) -> None:
        """So many of its extents are idle now."""
        self.idle[name] = min(idle, len(self.kv[name]))
        told = m.IdleKv(nbytes=self.idle[name] * GRANULE, recompute_us=recompute_us)
        self.say(name, m.Stepped(busy_us=5, idle=told, shares=self.shares(name)))

    def shares(self, name: str) -> list[m.StepShare]:
        """Of its leases in a step, and of one that is none of them."""
        members = [lease.serial for lease in self.machine.leases.values() if lease.runtime == name]
        return [m.StepShare(serial=serial, tokens=serial % 3, kv_blocks=serial % 4) for serial in [*members, 999]]

    def rests(self, name: str, *busy: int) -> None:
        """It has no sequence any more, but of these leases."""
        load = msgspec.convert([0] * 8, m.EngineLoad)
        self.say(name, m.LoadChanged(load=structs.replace(load, running=len(busy)), busy=list(busy)))

    def give_back(self, name: str) -> None:
        """What it was asked for, as far as that is idle."""
        count = min(self.idle[name], -(-self.reclaims.pop(name) // GRANULE))
        gone, self.kv[name] = self.kv[name][:count], self.kv[name][count:]
        self.idle[name] -= count
        idle = m.IdleKv(nbytes=self.idle[name] * GRANULE, recompute_us=0)
        self.say(name, m.KvReturned(extents=gone, idle=idle))

    def say(self, name: str, message: Any) -> None:
        if isinstance(message, m.KvWanted) and any(self.machine._state.members(name)):
            self.asked.add(name)
        self.do((name, message))

    def lease(self, name: str) -> Any:
        return next((lease for lease in self.machine.leases.values() if lease.instance == name), None)

    def wake(self, name: str, worth: dict[str, float] | None = None) -> int:
        self.serials += 1
        lease = m.Lease(gpu=0, epoch=1, serial=self.serials, secret=1)
        wake = m.Wake(lease=lease, instance=name, version=1, worth=worth or {}, peers=[], activation_nbytes=0)
        self.do(e.WakeAsked(wake, e.WakeRates(1e9, 0.0)))
        return self.serials

    def paused(self, name: str, steps: bool = False) -> int:
        """Its lease, which has a seat and no turn; with ``steps``, its runtime has had one."""
        serial = self.wake(name)
        if steps:
            self.step(name)
        self.do(m.Pause(serial=serial))
        return serial

    def outcomes(self) -> list[str]:
        return [each.outcome for each in self.controller if isinstance(each, m.Done)]


def kinds(messages: list[Any]) -> list[str]:
    return [type(message).__name__ for message in messages]


def states_of(played: Played) -> dict[str, str]:
    return {lease.instance: lease.state.value for lease in played.machine.leases.values()}
