"""Steps of several runtimes that have the turn of a GPU one after the other, done at once: pure.

While all of them have tokens to compute and no prompts, and nothing else is due, each has a step in turn. Whose turn
is next is decided when a step begins. What is computed for each step here is that, by the scheduling core's rule
(passing.py there), and when it ends.
Batches, leases and the core are told when the next step is one in which a stream ends, or when something else is due.
Nothing is different from what it would be step by step: tests compare.
"""

from collections.abc import Iterable
from heapq import heapify, heapreplace
from typing import Final

from dormouse.controller.scheduling.passing import Passed
from dormouse.controller.scheduling.scheduler import Scheduler
from dormouse.controller.simulator.leases import SimulatedLease, seat_of
from dormouse.controller.simulator.streams.runtime import SimulatedRuntime

LEAST: Final = 2
"""Steps, as long as the last one: with less until something is due, it is not worth while."""


class Rotating:
    """A lease that takes part. ``left``: steps until one of its streams ends; ``took_s`` of each in this rotation;
    ``told_s``: since when it wants a turn, or has it; ``used_s``: that it has had turns that are over.
    """

    __slots__ = (
        *("context", "fixed_s", "growing", "lease", "left", "per_context_s", "runtime", "told_s", "took_s"),
        "used_s",
    )

    def __init__(self, lease: SimulatedLease, runtime: SimulatedRuntime, left: int, told_s: float) -> None:
        self.lease, self.runtime, self.left, self.told_s = lease, runtime, left, told_s
        self.fixed_s, self.per_context_s, self.context, self.growing = runtime.batch.growing()
        self.took_s: list[float] = []
        self.used_s = 0.0


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
        if batch.idle and lease is not own:
            continue
        waits = seat.paused_s is not None and runtime.wants and not runtime.prompts
        if not (waits or lease is own) or not seat.here or lease.open or lease.extra_s or seat.computing is not None:
            return {}
        busy = (runtime.opening and lease is not own) or runtime.stepped or runtime.yielding or runtime.fresh
        if busy or (lease.wake.request < 0) != warm or not (left := batch.alike()):
            return {}
        told_s = now_s if seat.paused_s is None else seat.paused_s
        found[lease.wake.lease.serial] = Rotating(lease, runtime, left, told_s)
    return found if len(found) > 1 else {}


def rotate(
    found: dict[int, Rotating], own: SimulatedLease, core: Scheduler, now_s: float, until_s: float
) -> tuple[SimulatedLease, float]:
    """Who is about to have the first step that does not end before ``until_s``, and when; what was known of all is
    changed.
    """
    number, first = own.wake.lease.gpu, own.wake.lease.serial
    slacks = core.rounds.ahead(number, first, {serial: each.growing for serial, each in found.items()})
    if slacks is None:
        return own, now_s
    holder, each, began_s, since_s = first, found[first], now_s, now_s
    next_ones = [(other.told_s + slacks[serial], serial) for serial, other in found.items() if serial != first]
    heapify(next_ones)
    steps = 0
    while True:
        then = next_ones[0][1]
        took_s = each.fixed_s + each.per_context_s * each.context
        ends_s = now_s + took_s
        next_s = ends_s + found[then].runtime.spec.turn_s
        if each.left <= 1 or next_s >= until_s:
            break
        if steps:
            each.used_s += now_s - since_s
        each.took_s.append(took_s)
        each.left -= 1
        each.context += each.growing
        each.told_s = ends_s
        heapreplace(next_ones, (ends_s + slacks[holder], holder))
        steps, since_s, now_s = steps + 1, now_s, next_s
        holder, each = then, found[then]
    if not steps:
        return own, now_s
    each.told_s = since_s
    for other in found.values():
        _done(other, other is each)
    others = sorted((other for other in found.values() if other is not each), key=lambda other: other.told_s)
    core.rounds.passed(number, began_s, _passed(each), [_passed(other) for other in others])
    return each.lease, now_s


def _passed(each: Rotating) -> Passed:
    return Passed(each.lease.wake.lease.serial, each.told_s, each.growing, each.used_s)


def _done(each: Rotating, turn: bool) -> None:
    """So many steps. ``turn``: it has that."""
    runtime, seat = each.runtime, seat_of(each.lease)
    runtime.batch.advance(len(each.took_s))
    runtime.timer.learn_tokens(each.growing, [took_s * 1e6 for took_s in each.took_s])
    runtime.batch.learn_tokens(each.took_s)
    for took_s in each.took_s:
        runtime.busy_s += took_s
    runtime.wants, runtime.prompts, runtime.idles = not turn, False, False
    runtime.turning = runtime.opening = turn
    seat.paused_s = None if turn else each.told_s
