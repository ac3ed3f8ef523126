"""Steps of several runtimes that have the turn of a GPU one after the other, done at once: pure.

While all of them have tokens to compute and no prompts, and nothing else is due, each has a step in turn. What is
computed for each step here is who has the next one, by the scheduling core's rule (passing.py there), and when it ends.
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
    ``told_s``: since when it wants a turn, or has it.
    """

    __slots__ = ("context", "fixed_s", "growing", "lease", "left", "per_context_s", "runtime", "told_s", "took_s")

    def __init__(self, lease: SimulatedLease, runtime: SimulatedRuntime, left: int, told_s: float) -> None:
        self.lease, self.runtime, self.left, self.told_s = lease, runtime, left, told_s
        self.fixed_s, self.per_context_s, self.context, self.growing = runtime.batch.growing()
        self.took_s: list[float] = []


def rotating(leases: Iterable[SimulatedLease], own: SimulatedLease, now_s: float) -> dict[int, Rotating]:
    """By serial, if all that have something to compute there can take part, and are two at least. ``own`` has the turn,
    and is between two steps.
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
        busy = runtime.opening or runtime.stepped or runtime.yielding or runtime.fresh
        if busy or (lease.wake.request < 0) != warm or not (left := batch.alike()):
            return {}
        told_s = now_s if seat.paused_s is None else seat.paused_s
        found[lease.wake.lease.serial] = Rotating(lease, runtime, left, told_s)
    return found if len(found) > 1 else {}


def rotate(
    found: dict[int, Rotating], own: SimulatedLease, core: Scheduler, now_s: float, until_s: float
) -> tuple[SimulatedLease, float]:
    """Whose step is the last one that ends before ``until_s``, and when that is; what was known of all is changed."""
    number, first = own.wake.lease.gpu, own.wake.lease.serial
    slacks = core.rounds.ahead(number, first, {serial: each.growing for serial, each in found.items()})
    if slacks is None:
        return own, now_s
    holder, last, began_s, since_s = first, found[first], now_s, now_s
    next_ones = [(each.told_s + slacks[serial], serial) for serial, each in found.items() if serial != first]
    heapify(next_ones)
    while True:
        serial = next_ones[0][1]
        each = found[serial]
        took_s = each.fixed_s + each.per_context_s * each.context
        if each.left <= 1 or now_s + took_s >= until_s:
            break
        last.told_s = now_s
        heapreplace(next_ones, (now_s + slacks[holder], holder))
        each.took_s.append(took_s)
        each.left -= 1
        each.context += each.growing
        holder, last, since_s = serial, each, now_s
        now_s += took_s
    if since_s == began_s and holder == first:
        return own, now_s
    last.told_s = since_s
    for each in found.values():
        _done(each, each is last)
    others = sorted((each for each in found.values() if each is not last), key=lambda each: each.told_s)
    core.rounds.passed(
        number, began_s, _passed(last, last.took_s[:-1]), [_passed(each, each.took_s) for each in others]
    )
    return last.lease, now_s


def _passed(each: Rotating, took_s: list[float]) -> Passed:
    return Passed(each.lease.wake.lease.serial, each.told_s, each.growing, sum(took_s))


def _done(each: Rotating, turn: bool) -> None:
    """So many steps. ``turn``: it has that."""
    runtime, seat = each.runtime, seat_of(each.lease)
    runtime.batch.advance(len(each.took_s))
    runtime.timer.learn_tokens(each.growing, [took_s * 1e6 for took_s in each.took_s])
    for took_s in each.took_s:
        runtime.busy_s += took_s
    runtime.wants, runtime.prompts, runtime.idles = not turn, False, False
    seat.paused_s = None if turn else each.told_s
