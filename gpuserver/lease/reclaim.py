"""Room from idle KV: which runtime is asked for it, and whether before weights are evicted. Pure, on `MachineState`.

Under pressure the cheapest bytes go first, weights or KV, under one cost (`WakeEvictionCost`): worth of the model times
the time to bring a byte back. Weights are copied again. KV is computed again, if its prompt is asked again: the runtime
says how long that is expected to take (`IdleKv`), and how likely it is halves with every HALF_S without a step. The
cheapest runtime is asked for what is lacking; whoever needs it waits for the answer, and looks again.

A seat is left only when no runtime has idle KV any more. One that does not answer is ended (executor/runtimes.py).
"""

from collections.abc import Mapping
from typing import Final

from dormouse.gpuserver.lease.state import NO_IDLE_KV, SEATED, HeldLease, MachineState, RuntimeBooks
from dormouse.schemas import messages as m

HALF_S: Final = 60.0


def possible(state: MachineState) -> bool:
    """Whether anybody has idle KV: a glance, for those who mostly need none."""
    return any(books.kv_idle.nbytes or books.kv_asked for books in state.runtimes.values())


def cheaper(state: MachineState, asking: HeldLease, needed_nbytes: int) -> bool:
    """Whether others' idle KV is to make room for so many bytes, because it costs less than the weights that would:
    then the lease has to wait.
    """
    if not (held := _idle(state, asking.runtime)) and not _asked(state):
        return False
    short_nbytes = needed_nbytes + state.activations - state.residency.pool.free_nbytes
    if short_nbytes <= 0:
        return False
    if _asked(state):
        return True
    worth = asking.wake.worth
    books = min(held, key=lambda each: _cost_per_byte(state, each, worth))
    weights = state.residency.cheapest_per_byte(worth, asking.link_nbytes_s)
    if weights is not None and weights < _cost_per_byte(state, books, worth):
        return False
    _ask(state, books, short_nbytes)
    return True


def any_left(state: MachineState, nbytes: int, worth: Mapping[str, float], runtime: str = "") -> bool:
    """Whether idle KV is to make room, whatever it is worth: else a seat would have to be left. Not that of
    ``runtime``, which asks.
    """
    if _asked(state):
        return True
    if not (held := _idle(state, runtime)):
        return False
    _ask(state, min(held, key=lambda each: _cost_per_byte(state, each, worth)), nbytes)
    return True


def told(books: RuntimeBooks, idle: m.IdleKv | None) -> None:
    """By its runtime. What crosses with a question is older than the answer."""
    if idle is not None and not books.kv_asked:
        books.kv_idle = idle if idle.nbytes > 0 and idle.recompute_us >= 0 else NO_IDLE_KV


def returned(state: MachineState, books: RuntimeBooks, message: m.KvReturned) -> None:
    """It has given some back. One that was asked and has nothing is not asked again before its next step."""
    own = set(message.extents).intersection(state.kv(books))
    state.drop(own)
    asked, books.kv_asked = books.kv_asked, False
    told(books, message.idle)
    if asked:
        if not own:
            books.kv_idle = NO_IDLE_KV
        state.room()


def forget(books: RuntimeBooks) -> None:
    """Its seat is another one now."""
    books.kv_idle, books.kv_asked = NO_IDLE_KV, False


def _seated(state: MachineState, books: RuntimeBooks) -> list[HeldLease]:
    return [lease for lease in state.members(books.name) if lease.state in SEATED]


def _idle(state: MachineState, runtime: str) -> list[RuntimeBooks]:
    held = (books for books in state.runtimes.values() if books.kv_idle.nbytes and books.name != runtime)
    return [books for books in held if _seated(state, books)]


def _asked(state: MachineState) -> bool:
    return any(books.kv_asked and _seated(state, books) for books in state.runtimes.values())


def _cost_per_byte(state: MachineState, books: RuntimeBooks, worth: Mapping[str, float]) -> float:
    """Expected seconds, as those of weights."""
    idle, leases = books.kv_idle, _seated(state, books)
    since_s = max(lease.since_s for lease in leases)
    likely: float = 2.0 ** (-max(0.0, state.now_s - since_s) / HALF_S)
    return max(worth.get(lease.instance, 0.0) for lease in leases) * likely * idle.recompute_us / 1e6 / idle.nbytes


def _ask(state: MachineState, books: RuntimeBooks, nbytes: int) -> None:
    books.kv_asked, wanted = True, max(1, min(nbytes, books.kv_idle.nbytes))
    state.tell(_seated(state, books)[0], m.KvReclaim(nbytes=wanted))
