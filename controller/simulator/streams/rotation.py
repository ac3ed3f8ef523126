"""Steps of several runtimes that have the turn of a GPU one after the other, done at once: pure.

While all of them have tokens to compute and no prompts, and nothing else is due, each has a step in turn. The next turn
is decided when a step begins. For each step, only that is computed here, by the scheduling core's rule (passing.py
there), and the step's end. A stream may end with a step, and a runtime then have nothing to do: it takes part no more.
Memory for KV grows as long as nobody has to leave for it. A lease without sequences may end meanwhile. Batches, leases
and the core are told when something else is due, or needs more than that. The result is the same as step by step: tests
compare.
"""

from collections.abc import Callable, Iterable
from functools import partial, reduce
from heapq import heapify, heappop, heappush, heappushpop
from operator import add, attrgetter
from typing import Any, Final

from dormouse.controller.simulator.agenda import COMPUTED, COPIED, PRELOADED, TICK, UNWANTED, Agenda, Entry
from dormouse.controller.simulator.leases import SimulatedLease, seat_of
from dormouse.controller.simulator.streams.memory import KvMemory
from dormouse.controller.simulator.streams.model import MAX_OPEN
from dormouse.controller.simulator.streams.runtime import SimulatedRuntime
from dormouse.controller.simulator.streams.stream import Advanced
from dormouse.core.decisions.scheduling.events import RuntimesOn
from dormouse.core.decisions.scheduling.passing import Passed
from dormouse.core.decisions.scheduling.scheduler import Scheduler

MIN: Final = 2
"""Steps, as long as the last one: with less until something is due, it is not worth while."""


class Rotating:
    """A lease that takes part. With the step whose context is ``last``, one of its streams ends; until then it is
    ``short`` of so many blocks of KV; ``took_s`` of each since `look`; ``told_s``: since when it wants a turn, or has
    it; ``used_s``: that it has had turns that are over.
    """

    __slots__ = (
        *("context", "fixed_s", "growing", "last", "lease", "per_context_s", "runtime", "serial", "short", "slack_s"),
        *("told_s", "took_s", "turn_s", "used_s"),
    )

    def __init__(self, lease: SimulatedLease, runtime: SimulatedRuntime, told_s: float) -> None:
        self.lease, self.runtime, self.told_s = lease, runtime, told_s
        self.serial, self.turn_s = lease.wake.lease.serial, runtime.spec.turn_s
        self.took_s: list[float] = []
        self.used_s = self.slack_s = 0.0
        self.look()

    def look(self) -> None:
        """Read the properties of its next steps."""
        batch = self.runtime.batch
        steps = batch.alike()
        self.short = batch.short(steps)
        self.fixed_s, self.per_context_s, self.context, self.growing = batch.growing()
        self.last = self.context + self.growing * (steps - 1)

    def done(self) -> Advanced:
        """So many steps."""
        runtime, took_s, self.took_s = self.runtime, self.took_s, []
        runtime.learned.learn_tokens(self.growing, took_s)
        runtime.busy_s = reduce(add, took_s, runtime.busy_s)  # sum() rounds otherwise in newer Pythons
        return runtime.batch.advance(len(took_s))


def rotating(leases: Iterable[SimulatedLease], own: SimulatedLease, now_s: float) -> dict[int, Rotating]:
    """By serial, if all that have something to compute there can take part, and are two at least. ``own`` has the turn,
    and is about to have a step.
    """
    found: dict[int, Rotating] = {}
    warm = own.wake.request < 0
    for lease in leases:
        runtime, seat = lease.runtime, lease.seat
        if runtime is None or seat is None:
            return {}
        batch = runtime.batch
        if not batch.count:
            if lease is own:
                return {}
            continue
        waits = seat.paused_s is not None and runtime.wants and not runtime.prompts
        if not (waits or lease is own) or not seat.here or lease.open or lease.extra_s or seat.computing is not None:
            return {}
        if seat.paused_s is not None and seat.paused_s == runtime.lent_s:
            return {}  # the core's order by arrival has it since before the step that was lent, its margins since then
        busy = (runtime.opening and lease is not own) or runtime.stepped or runtime.yielding or runtime.fresh
        if busy or (lease.wake.request < 0) != warm or batch.has_prompts:
            return {}
        told_s = now_s if seat.paused_s is None else seat.paused_s
        found[lease.wake.lease.serial] = Rotating(lease, runtime, told_s)
    return found if len(found) > 1 else {}


def next_due_s(agenda: Agenda) -> float:
    """When something is due that is not void."""
    while agenda.heap and _void(*agenda.heap[0][2:]):
        heappop(agenda.heap)
    return agenda.next_s


def _void(kind: int, what: Any, version: int) -> bool:
    if kind == UNWANTED:
        return what.lost or what.closed or version != what.runtime.lives  # type: ignore[no-any-return]
    return kind in (COMPUTED, COPIED) and version != what.version


def _apart(number: int, gone: Iterable[Rotating], kind: int, what: Any) -> bool:
    """Whether nothing comes of it for those that take part on this GPU."""
    if kind == UNWANTED:
        return what.wake.lease.gpu == number and all(each.lease is not what for each in gone)
    return kind == TICK or (kind == PRELOADED and isinstance(what, RuntimesOn))


class Rotation:
    """Of one node. ``advanced`` receives streams that end; ``happens`` takes what is due that is no lease's turn."""

    happens: Callable[[int, Any, int], None]

    def __init__(self, agenda: Agenda, memory: KvMemory, advanced: Callable[[Advanced], None]) -> None:
        self._agenda, self._memory, self._advanced = agenda, memory, advanced

    def rotate(self, found: dict[int, Rotating], own: SimulatedLease, core: Scheduler) -> SimulatedLease:
        """The lease that is about to have the first step that does not end before something is due. The clock moves to
        that time, and the state of all leases with it.
        """
        agenda = self._agenda
        now_s, until_s = agenda.now_s, agenda.next_s
        number, first = own.wake.lease.gpu, own.wake.lease.serial
        slacks = core.rounds.ahead(number, first, {serial: each.growing for serial, each in found.items()})
        if slacks is None:
            return own
        for other in found.values():
            other.slack_s = slacks[other.serial]
        each, began_s, since_s = found[first], now_s, now_s
        others = [other for serial, other in found.items() if serial != first]
        next_ones = [(other.told_s + other.slack_s, other.serial, other) for other in others]
        heapify(next_ones)
        then = heappop(next_ones)[2]
        gone: list[Rotating] = []
        some = False
        while each.short <= 0 or self._grows(each, now_s):
            context = each.context
            took_s, ends = each.fixed_s + each.per_context_s * context, context >= each.last
            ends_s = now_s + took_s
            next_s = ends_s + then.turn_s
            if ends and each.growing >= MAX_OPEN:  # else nobody waits to be let in
                break
            if next_s >= until_s:
                if not (core.rounds.taken and self._passes(number, gone, next_s)):
                    break
                until_s = agenda.next_s
            each.used_s += now_s - since_s  # in its last turn
            each.took_s.append(took_s)
            each.told_s = ends_s
            each.context = context + each.growing
            some, since_s, now_s = True, now_s, next_s
            if ends:
                if self._ends(each, ends_s):
                    gone.append(found.pop(each.serial))
                    until_s = agenda.next_s
                    each = then
                    if not next_ones:
                        break
                    then = heappop(next_ones)[2]
                    continue
                each.slack_s = core.rounds.slack_s(number, each.serial, each.growing)
            each, then = then, heappushpop(next_ones, (ends_s + each.slack_s, each.serial, each))[2]
        agenda.now_s = now_s
        if not some:
            return own
        each.told_s = since_s
        others = sorted(found.values(), key=attrgetter("told_s"))
        others.remove(each)
        for other in (each, *others):
            other.done()
        for other in (each, *others, *gone):
            _known(other, other is each)
        core.rounds.passed(number, began_s, _passed(each), map(_passed, others), map(_passed, gone))
        return each.lease

    def _passes(self, number: int, gone: list[Rotating], next_s: float) -> bool:
        """Whether all that is due until then is of nobody who takes part, and over: leases that have nothing to do end,
        and the core looks at waiting leases.
        """
        heap, due = self._agenda.heap, list[Entry]()
        while heap and heap[0][0] <= next_s and (_void(*heap[0][2:]) or _apart(number, gone, *heap[0][2:4])):
            due.append(heappop(heap))
        if self._agenda.next_s <= next_s:
            for entry in due:
                heappush(heap, entry)
            return False
        for self._agenda.now_s, _, kind, what, version in due:
            self.happens(kind, what, version)
        return self._agenda.next_s > next_s or self._passes(number, gone, next_s)

    def _grows(self, each: Rotating, now_s: float) -> bool:
        """Before its step. False: others would have to leave for it."""
        if not self._memory.plenty(each.lease, each.short):
            return False
        each.runtime.batch.brief = False
        each.runtime.batch.plan(partial(self._memory.grow, each.lease), now_s)
        each.short = 0
        return True

    def _ends(self, each: Rotating, now_s: float) -> bool:
        """Some of its streams do, with a step that ends now; whether it has nothing to do then."""
        self._agenda.now_s = now_s
        self._advanced(each.done())
        runtime = each.runtime
        if runtime.batch.count:
            each.look()
            return False
        self._agenda.put(now_s + runtime.spec.idle_s, UNWANTED, each.lease, runtime.lives)
        return True


def _passed(each: Rotating) -> Passed:
    return Passed(each.serial, each.told_s, each.growing, each.used_s)


def _known(each: Rotating, turn: bool) -> None:
    """Update the state of the lease. ``turn``: it has the turn."""
    runtime, seat = each.runtime, seat_of(each.lease)
    runtime.wants, runtime.prompts, runtime.idles = not turn and runtime.batch.count > 0, False, False
    runtime.turning = runtime.opening = turn
    seat.paused_s = None if turn else each.told_s
