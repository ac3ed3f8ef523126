"""Room from idle KV and idle seats: decides which of them to take, and whether before weights. Pure, on `MachineState`.

Under pressure the cheapest bytes go first, weights or KV, under one cost (`WakeEvictionCost`): worth of the model times
the time to bring a byte back. Weights are copied again. KV is computed again, if its prompt is asked again: the runtime
reports how long that is expected to take (`IdleKv`), and its probability halves with every HALF_S without a step. The
cheapest runtime is asked for the missing bytes; the lease that needs them waits for the answer, and tries again.

The weights of a runtime without sequences are in that order, too, once it has rested for REST_S: when they come first,
all of its leases end, and with them its KV; the weights are then as idle as any. Its instances ask for leases with
their next requests. Until then it keeps both, for `MachineState.seat_idle_s`.

When no runtime has idle KV any more, a runtime that rests at all is ended, and then others leave their seats. A runtime
that does not answer is ended (executor/runtimes.py).
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import endings
from dormouse.core.decisions.leases.held import NO_IDLE_KV, SEATED, TURN, HeldLease, LeaseState, RuntimeBooks
from dormouse.core.decisions.leases.state import MachineState
from dormouse.core.decisions.memory.bringing import cheapest_per_byte
from dormouse.schemas import messages as m

HALF_S: Final = 60.0

REST_S: Final = 2.0
"""Rest before the weights count as idle: the next request of a conversation often comes sooner."""


def possible(state: MachineState) -> bool:
    """Whether any runtime has idle KV or rests: a cheap check for callers that mostly need neither."""
    return any(books.kv_idle.nbytes or books.kv_asked or books.rests for books in state.runtimes.values())


def cheaper(state: MachineState, asking: HeldLease, needed_nbytes: int) -> bool:
    """Whether others' idle KV or seats are to make room for so many bytes, because they cost less than weights: then
    the lease has to wait.
    """
    held, waits = _idle(state, asking.runtime), _asked(state) or _ends(state)
    resting = [each for each in _resting(state, asking.runtime) if state.now_s >= _since_s(state, each) + REST_S]
    if not (held or resting or waits):
        return False
    short_nbytes = needed_nbytes + state.activations - state.residency.pool.free_nbytes
    if short_nbytes <= 0:
        return False
    if waits:
        return True
    worth, link_nbytes_s = state.worth, asking.link_nbytes_s
    costs = [(_cost_per_byte(state, books, worth), books, False) for books in held]
    for books in resting:
        seats = [lease.instance for lease in _seated(state, books) if state.residency.seated(lease.instance)]
        if seats and (own := cheapest_per_byte(state.residency, worth, link_nbytes_s, seats)) is not None:
            costs.append((own, books, True))
    if not costs:
        return False
    cost, books, ends = min(costs, key=lambda each: each[0])
    weights = cheapest_per_byte(state.residency, worth, link_nbytes_s)
    if weights is not None and weights < cost:
        return False
    if ends:
        _end(state, books)
    else:
        _ask(state, books, short_nbytes)
    return True


def any_left(state: MachineState, nbytes: int, worth: Mapping[str, float], runtime: str = "") -> bool:
    """Whether idle KV is to make room, whatever its worth: else a seat would have to end or be left. KV of ``runtime``,
    which asks, does not count.
    """
    if _asked(state):
        return True
    if not (held := _idle(state, runtime)):
        return False
    _ask(state, min(held, key=lambda each: _cost_per_byte(state, each, worth)), nbytes)
    return True


def end_one(state: MachineState, runtime: str) -> bool:
    """Have the leases end of the runtime that has rested for longest, but not of ``runtime``; False if none rests. Not
    for the compute thread, which could let go of no lease while it waits.
    """
    if not (resting := _resting(state, runtime)):
        return False
    _end(state, min(resting, key=lambda books: _since_s(state, books)))
    return True


def tick(state: MachineState) -> None:
    for books in [books for books in state.runtimes.values() if _may_end(state, books)]:
        if state.now_s >= _until_s(state, books):
            _end(state, books)


def next_deadline_s(state: MachineState) -> float | None:
    """Time at which to check whether a runtime has rested for long enough."""
    resting = (books for books in state.runtimes.values() if _may_end(state, books))
    return min((_until_s(state, books) for books in resting), default=None)


def told(books: RuntimeBooks, idle: m.IdleKv | None) -> None:
    """Its runtime has reported. A report that crosses with a question is older than the answer."""
    if idle is not None and not books.kv_asked:
        books.kv_idle = idle if idle.nbytes > 0 and idle.recompute_us >= 0 else NO_IDLE_KV


def returned(state: MachineState, books: RuntimeBooks, message: m.KvReturned) -> None:
    """It has given some back. A runtime that had nothing to give is not asked again before its next step."""
    own = set(message.extents).intersection(state.kv(books))
    state.drop(own)
    asked, books.kv_asked = books.kv_asked, False
    told(books, message.idle)
    if asked:
        if not own:
            books.kv_idle = NO_IDLE_KV
        state.room()


def forget(books: RuntimeBooks) -> None:
    """It now has another seat."""
    books.kv_idle, books.kv_asked = NO_IDLE_KV, False


def _seated(state: MachineState, books: RuntimeBooks) -> list[HeldLease]:
    return [lease for lease in state.members(books.name) if lease.state in SEATED]


def _idle(state: MachineState, runtime: str) -> list[RuntimeBooks]:
    held = (books for books in state.runtimes.values() if books.kv_idle.nbytes and books.name != runtime)
    return [books for books in held if _seated(state, books)]


def _asked(state: MachineState) -> bool:
    return any(books.kv_asked and _seated(state, books) for books in state.runtimes.values())


def _may_end(state: MachineState, books: RuntimeBooks) -> bool:
    """Whether it may end: not while it lets go of something already."""
    still = (*SEATED, LeaseState.AWAY)
    return books.rests and not books.wanting and all(lease.state in still for lease in state.members(books.name))


def _resting(state: MachineState, runtime: str) -> list[RuntimeBooks]:
    others = (books for books in state.runtimes.values() if books.name != runtime and _may_end(state, books))
    return [books for books in others if _seated(state, books)]


def _ends(state: MachineState) -> bool:
    """Whether a resting runtime is about to have ended."""
    closing = (lease.runtime for lease in state.leases.values() if lease.state is LeaseState.CLOSING and lease.runtime)
    return any(state.runtimes[runtime].rests for runtime in closing)


def _end(state: MachineState, books: RuntimeBooks) -> None:
    """Its instances are notified first: frames sent meanwhile go on with another lease. A lease with the turn is last,
    so that the seat is left at once, turn and all.
    """
    for lease in sorted(state.members(books.name), key=lambda lease: lease.state in TURN):
        end_lease(state, lease)


def end_lease(state: MachineState, lease: HeldLease) -> None:
    state.asks()
    over = m.SeatOver(serial=lease.serial, unneeded=True)
    state.emit(o.Reply(lease.instance, msgspec.msgpack.encode(over)))
    endings.close(state, lease, "ended")


def _since_s(state: MachineState, books: RuntimeBooks) -> float:
    """Time since which it has had nothing to do, if it is idle."""
    return max(lease.since_s for lease in state.members(books.name))


def _until_s(state: MachineState, books: RuntimeBooks) -> float:
    """Time until which a resting runtime keeps its seats, though the room is not needed."""
    return _since_s(state, books) + (0.0 if state.drains else state.seat_idle_s)


def _cost_per_byte(state: MachineState, books: RuntimeBooks, worth: Mapping[str, float]) -> float:
    """Expected seconds, as those of weights."""
    idle, leases = books.kv_idle, _seated(state, books)
    likely: float = 2.0 ** (-max(0.0, state.now_s - _since_s(state, books)) / HALF_S)
    return max(worth.get(lease.instance, 0.0) for lease in leases) * likely * idle.recompute_us / 1e6 / idle.nbytes


def _ask(state: MachineState, books: RuntimeBooks, nbytes: int) -> None:
    state.asks()
    books.kv_asked, wanted = True, max(1, min(nbytes, books.kv_idle.nbytes))
    state.tell(_seated(state, books)[0], m.KvReclaim(nbytes=wanted))
