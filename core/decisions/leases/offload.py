"""Room for KV before it is asked for (ServerlessLoRA §4.3, Eqs. 6 and 7): pure, on `MachineState`.

While a runtime's KV grows, as much is kept free as it is expected to ask for before others could have made room: its
last request, plus its growth in the time that making room has taken lately. Evicting weights takes no time. Having a
runtime give idle KV back, or leave its seat when it rests, does take time: it is asked as soon as less than that is
free, before the next request for KV comes and its sequences wait.

The order is that of evictions, by the same cost: idle weights, adapters and preloaded models (all of these are segments
of unused models), idle KV of others, and others' idle seats.
"""

from typing import Final

from dormouse.core.decisions.leases import preloads, reclaim
from dormouse.core.decisions.leases.held import HeldLease, RuntimeBooks
from dormouse.core.decisions.leases.state import MachineState
from dormouse.core.decisions.memory.bringing import spare

HALF_S: Final = 1.0
"""Half-life of past growth: a burst of prompts lasts that long, and earlier growth predicts nothing."""

MAX_SHARE: Final = 8
"""At most one part in so many of the memory is kept free."""


def reserve_nbytes(state: MachineState) -> int:
    """Bytes to keep free, beside activations."""
    if state.offload != "ahead":
        return 0
    wanted = sum([_wanted(state, books) for books in state.runtimes.values()])
    return min(int(wanted), state.residency.capacity // MAX_SHARE)


def _wanted(state: MachineState, books: RuntimeBooks) -> float:
    part: float = 2.0 ** (-(state.now_s - books.grown_s) / HALF_S)
    if part < 0.5**3 or books.rests:
        return 0.0  # it grows no more
    return books.last_nbytes + books.grown_nbytes * part / HALF_S * state.room_s


def grew(state: MachineState, books: RuntimeBooks, nbytes: int) -> None:
    part: float = 2.0 ** (-(state.now_s - books.grown_s) / HALF_S) if books.grown_nbytes else 0.0
    books.grown_nbytes = books.grown_nbytes * part + nbytes
    books.grown_s, books.last_nbytes = state.now_s, nbytes


def ahead(state: MachineState, lease: HeldLease) -> None:
    """Has room made, if less than the reserve is free. ``lease``: of a runtime that grows."""
    wanted_nbytes = reserve_nbytes(state)
    short_nbytes = wanted_nbytes + state.activations - state.residency.pool.free_nbytes
    if short_nbytes <= 0 or preloads.give_up(state):
        return
    if reclaim.possible(state) and reclaim.cheaper(state, lease, wanted_nbytes):
        return  # when that is here, this is looked at again
    plan = spare(state.residency, short_nbytes, state.worth, lease.link_nbytes_s)
    if plan.evicted:
        state.arrange(plan)
        state.press()
