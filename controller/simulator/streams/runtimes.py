"""Leases of simulated language models, as decisions/leases/runtimes.py has them: seats with KV that grows, and turns of
steps. Pure.

A turn ends between two steps. The core is told that it may be another's when it begins in a seat that its lease has,
for one step is computed in any case; else after the first step. If nobody wants it, the steps go on. A seat that is
released loses its KV (memory.py), and its sequences begin again. A lease without sequences ends after a while.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from dormouse.controller.simulator.agenda import IDLES, OPENED, PRESSED, STEPPED, TURNED, UNWANTED, WANTS, Agenda
from dormouse.controller.simulator.gpu import SimulatedGpu
from dormouse.controller.simulator.leases import SimulatedLease, seat_of
from dormouse.controller.simulator.links import Links, SimulatedCopy, SimulatedLink
from dormouse.controller.simulator.preloads import Preloads
from dormouse.controller.simulator.streams.cost import EqualSteps
from dormouse.controller.simulator.streams.lending import borrower
from dormouse.controller.simulator.streams.memory import KvMachine, KvMemory
from dormouse.controller.simulator.streams.rotation import MIN, Rotation, next_due_s, rotating
from dormouse.controller.simulator.streams.runtime import runtime_of
from dormouse.controller.simulator.streams.stream import Advanced, Stream
from dormouse.controller.simulator.streams.telling import RuntimeTells
from dormouse.core.decisions.rules.joins import IN_TURN, latest_s
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler


class SeatsAndTurns(KvMachine, Protocol):
    """The owner of turns and seats: executors.py."""

    @property
    def preloads(self) -> Preloads: ...

    core: Scheduler

    def passed(self, lease: SimulatedLease, other: SimulatedLease) -> None:
        """The turn of the one is the other's."""

    def ended(self, lease: SimulatedLease) -> None:
        """It has done all."""

    def leave(self, lease: SimulatedLease) -> None:
        """It has none any more; the next that waits for it may begin."""

    def next_turns(self, number: int) -> None:
        """Whoever waits for a turn there may begin."""


class RuntimeLeases:
    """Of one node. ``advanced`` receives the results of steps; ``failed`` a stream that never fits."""

    def __init__(
        self,
        machine: SeatsAndTurns,
        gpus: Sequence[SimulatedGpu],
        processors: Sequence[SimulatedLink],
        work: Links,
        agenda: Agenda,
        tell: Callable[[ev.Event], None],
    ) -> None:
        self._machine, self._gpus, self._processors, self._work = machine, gpus, processors, work
        self._agenda, self._tell = agenda, tell
        self._tells = RuntimeTells(agenda, tell)
        self.memory = KvMemory(machine, gpus, agenda)
        self.rotation = Rotation(agenda, self.memory, lambda made: self.advanced(made))
        self.margins = True  # sequences join by them
        self.rotates = True
        self.advanced: Callable[[Advanced], None] = lambda made: None
        self.failed: Callable[[Stream], None] = lambda stream: None
        self.closes: Callable[[SimulatedLease], None] = lambda lease: None

    # --- streams

    def submit(self, lease: SimulatedLease, *streams: Stream) -> None:
        """They join with the next step."""
        runtime, seat = runtime_of(lease), lease.seat
        self._machine.preloads.stop(lease.wake.lease.gpu)
        runtime.lives += 1
        joins = runtime.batch.takes_more
        for stream in streams:
            self.add(lease, stream)
        if seat is None:
            return  # it waits for its first turn
        if seat.paused_s is not None:
            if not runtime.prompts:
                runtime.wants = False  # it reports it once more
            self._want(lease)
        elif seat.computing is None:
            self._go_on(lease)
        elif joins:
            self._cut(lease)

    def add(self, lease: SimulatedLease, stream: Stream) -> None:
        """It waits there."""
        runtime = runtime_of(lease)
        by_margin = self.margins and not runtime.spec.closed
        latest = latest_s(stream.first_s, stream.left, runtime.times) if by_margin else IN_TURN
        runtime.batch.add(stream, latest)

    def take(self, lease: SimulatedLease, stream: Stream) -> None:
        """It goes on elsewhere, from the next step on; others are left."""
        runtime_of(lease).batch.drop(stream)
        if lease.seat is not None:
            self._cut(lease)

    def _want(self, lease: SimulatedLease) -> None:
        runtime = runtime_of(lease)
        if not runtime.wants and runtime.batch.count:
            runtime.wants, runtime.prompts = True, bool(runtime.batch.begins)
            self._agenda.put(self._agenda.now_s, WANTS, lease)

    # --- steps

    def compute(self, lease: SimulatedLease) -> None:
        """It has a turn, and its weights are here or on their way."""
        runtime = runtime_of(lease)
        opens_s = runtime.spec.seat_s + (runtime.spec.start_s if runtime.cold else 0.0)
        if runtime.fresh and opens_s and not runtime.opening:
            runtime.opening, runtime.cold = True, False
            self._agenda.put(self._agenda.now_s + opens_s, OPENED, lease)
        if runtime.fresh:
            self._go_on(lease)
            return
        runtime.opening = runtime.turning = True
        self._agenda.put(self._agenda.now_s + runtime.spec.turn_s, TURNED, lease)

    def _go_on(self, lease: SimulatedLease) -> None:
        runtime, seat = runtime_of(lease), seat_of(lease)
        if runtime.opening or runtime.stepped or not seat.here:
            return
        if self._machine.preloads.holds(lease.wake.lease.gpu):
            return
        batch = runtime.batch
        while (steps := self._plan(lease)) is None:
            if not batch.count:
                self._rest(lease)
                return
            runtime.stepped = True  # others may join because of that, and do not begin a step
            self.failed(batch.remove_first(self._agenda.now_s))
            runtime.stepped = False
        runtime.fresh = runtime.turning = False
        runtime.steps = steps
        many = runtime.idles and not (lease.open or runtime.yielding)
        self._begin(lease, steps.count if many else 1)

    def _plan(self, lease: SimulatedLease) -> EqualSteps | None:
        gpu, batch, now_s = self._gpus[lease.wake.lease.gpu], runtime_of(lease).batch, self._agenda.now_s
        batch.brief = not lease.open and batch.has_prompts and gpu.shared(now_s)
        return batch.plan(partial(self.memory.grow, lease), now_s)

    def goes_on(self, lease: SimulatedLease) -> None:
        """If it has a turn and nothing under way."""
        seat = seat_of(lease)
        if seat.paused_s is None and seat.computing is None and runtime_of(lease).batch.count:
            self._go_on(lease)

    def _begin(self, lease: SimulatedLease, count: int, done_s: float = 0.0) -> None:
        runtime, seat = runtime_of(lease), seat_of(lease)
        runtime.count, runtime.work_s = count, runtime.steps.seconds(count)
        seat.computing = SimulatedCopy(runtime.work_s - done_s, (self._processors[lease.wake.lease.gpu],), lease)
        self._work.begin(seat.computing, self._agenda.now_s)

    def _done_s(self, lease: SimulatedLease, work: SimulatedCopy) -> float:
        """Of its computation."""
        return runtime_of(lease).work_s - max(0.0, work.left - work.rate * (self._agenda.now_s - work.at_s))

    def _cut(self, lease: SimulatedLease) -> None:
        """End with the step that is under way."""
        runtime, seat = runtime_of(lease), seat_of(lease)
        work = seat.computing
        if work is None or runtime.count == 1:
            return
        done_s = self._done_s(lease, work)
        count = max(1, runtime.steps.until(done_s))
        if count < runtime.count:
            self._work.end(work, self._agenda.now_s)
            self._begin(lease, count, min(done_s, runtime.steps.seconds(count)))

    def computed(self, lease: SimulatedLease) -> None:
        """All but what copies make it wait for."""
        runtime = runtime_of(lease)
        if not lease.open and not lease.extra_s:
            (self._lent_over if runtime.lent else self._stepped)(lease)
            return
        runtime.stepped = True
        if lease.open:
            self._lend(lease.wake.lease.gpu)
        else:
            self._agenda.put(self._agenda.now_s + lease.extra_s, STEPPED, lease)

    def copied(self, lease: SimulatedLease) -> None:
        """Nothing is on its way any more."""
        if runtime_of(lease).stepped:
            self._agenda.put(self._agenda.now_s + lease.extra_s, STEPPED, lease)

    def _made(self, lease: SimulatedLease) -> None:
        """The work under way is done."""
        runtime = runtime_of(lease)
        runtime.busy_s += runtime.work_s
        self._tells.learn(lease)
        runtime.stepped = True  # others may join because of what it has made, and do not begin a step
        self.advanced(runtime.batch.advance(runtime.count))
        runtime.stepped = False

    def _stepped(self, lease: SimulatedLease) -> None:
        runtime, seat = runtime_of(lease), seat_of(lease)
        lease.extra_s = 0.0
        self._made(lease)
        if not runtime.idles and not runtime.yielding:
            runtime.idles = True
            self._tells.idle(lease)  # which may cost the turn at once
        elif runtime.yielding:
            self._yield(lease)
        if seat.paused_s is None:
            self._go_on(lease)
        elif not runtime.batch.count:
            self._rest(lease)

    def _lend(self, number: int) -> None:
        """A step, if somebody waits for weights and another can have one."""
        gpu = self._gpus[number]
        if gpu.lent or self._machine.preloads.holds(number):
            return
        lease = borrower(gpu.leases.values(), self.memory)
        if lease is not None and (steps := self._plan(lease)) is not None:
            runtime = runtime_of(lease)
            gpu.lent = runtime.lent = True
            runtime.steps = steps
            self._begin(lease, 1)

    def _lent_over(self, lease: SimulatedLease) -> None:
        runtime, number = runtime_of(lease), lease.wake.lease.gpu
        self._made(lease)
        self._gpus[number].lent = runtime.lent = False
        seat_of(lease).paused_s = runtime.lent_s = self._agenda.now_s
        if not runtime.batch.count:
            self._rest(lease)
        else:
            runtime.wants = False  # it reports its work anew
            self._want(lease)
        self._machine.next_turns(number)
        self._lend(number)

    def _turned(self, lease: SimulatedLease) -> None:
        """Its turn has begun, and with this step it may be another's."""
        lease = self._others_turns(lease)
        runtime = runtime_of(lease)
        runtime.opening, runtime.idles = False, True
        self._tells.idle(lease)
        if seat_of(lease).paused_s is None:
            self._go_on(lease)

    def _others_turns(self, lease: SimulatedLease) -> SimulatedLease:
        """The turn would be another's with each step: have all steps until something else is due, if that can be.
        Returns the lease that has it then.
        """
        gpu, agenda = self._gpus[lease.wake.lease.gpu], self._agenda
        if not self.rotates or gpu.blocked:
            return lease
        if next_due_s(agenda) - agenda.now_s < MIN * runtime_of(lease).steps.first_s:
            return lease
        core = self._machine.core
        if not core.rounds.able(gpu.number) or not (found := rotating(gpu.leases.values(), lease, agenda.now_s)):
            return lease
        last = self.rotation.rotate(found, lease, core)
        self._machine.passed(lease, last)
        return last

    def _rest(self, lease: SimulatedLease) -> None:
        """There is nothing to do."""
        runtime = runtime_of(lease)
        if seat_of(lease).paused_s is None:
            runtime.idles = True
            self._agenda.put(self._agenda.now_s, IDLES, lease)
        self._agenda.put(self._agenda.now_s + runtime.spec.idle_s, UNWANTED, lease, runtime.lives)

    def due(self, kind: int, lease: SimulatedLease, version: int) -> None:
        runtime = runtime_of(lease)
        if kind == PRESSED:
            gpu = self._gpus[lease.wake.lease.gpu]
            self._tell(ev.Evicted(gpu.number, gpu.epoch, tuple(gpu.residency.changed()), gpu.stats))
            if (runtimes := tuple(gpu.contexts)) != gpu.told:
                gpu.told = runtimes
                self._tell(ev.RuntimesOn(gpu.number, gpu.epoch, runtimes))
        elif lease.lost or lease.closed:
            return
        elif kind == TURNED:
            if runtime.opening:
                self._turned(lease)
        elif kind == WANTS:
            self._tells.want_turn(lease)
            self._lend(lease.wake.lease.gpu)
        elif kind == IDLES:
            if seat_of(lease).paused_s is None:
                self._tells.idle(lease)
        elif kind == STEPPED:
            self._stepped(lease)
        elif kind == OPENED:
            runtime.opening = False
            if seat_of(lease).paused_s is None:
                self._go_on(lease)
        elif version == runtime.lives and not runtime.batch.count:
            self.close(lease)

    def close(self, lease: SimulatedLease) -> None:
        """One with nothing to do."""
        lease.closed = True
        self.closes(lease)
        if seat_of(lease).paused_s is None:
            self._machine.leave(lease)
        self._machine.ended(lease)

    # --- turns

    def pause(self, lease: SimulatedLease) -> None:
        """Its turn is another's, from the next boundary on."""
        runtime = runtime_of(lease)
        runtime.yielding = True
        begins = runtime.turning and runtime.batch.count
        if seat_of(lease).computing is None and not runtime.stepped and not begins:
            self._yield(lease)
        else:
            self._cut(lease)

    def _yield(self, lease: SimulatedLease) -> None:
        runtime, seat = runtime_of(lease), seat_of(lease)
        runtime.yielding = runtime.idles = runtime.turning = False
        seat.paused_s = self._agenda.now_s
        self._want(lease)
        self._machine.leave(lease)

    def lost(self, lease: SimulatedLease) -> None:
        """With its GPU. Progress of its streams that it has reported counts."""
        runtime, seat = runtime_of(lease), seat_of(lease)
        runtime.stepped = True  # nothing begins here any more
        if seat.computing is not None:
            whole = runtime.steps.done(self._done_s(lease, seat.computing)) if not lease.open else 0
            self._work.end(seat.computing, self._agenda.now_s)
            seat.computing = None
            if whole:
                self.advanced(runtime.batch.advance(min(whole, runtime.count)))
        runtime.batch.give_up(counts=False)
