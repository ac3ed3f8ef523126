"""Room for KV before it is asked for (ServerlessLoRA §4.3, Eqs. 6 and 7): pure, on `MachineState`.

While a runtime's KV grows, as much is kept free as it is expected to ask for until others could have made room: what it
asked for last, and what it grows by in the time that making room has taken lately. Evicting weights takes no time.
What does is to have a runtime give idle KV back, or leave its seat when it rests: these are asked as soon as less than
that is free, and not when the next question is there and its sequences wait.

What goes is what an eviction would take, by the same cost: idle weights, adapters and what was brought before it was
asked for (all of these are segments of models that nobody uses), idle KV of others, and others' idle seats.
"""

from typing import Final

from dormouse.core.decisions.leases import preloads, reclaim
from dormouse.core.decisions.leases.held import HeldLease, RuntimeBooks
from dormouse.core.decisions.leases.state import MachineState
from dormouse.core.decisions.memory.bringing import spare

HALF_S: Final = 1.0
"""Growth so long ago counts half: a burst of prompts lasts that long, and what has grown before it says nothing."""

MAX_SHARE: Final = 8
"""A part in so many of the memory is kept free at most."""


def reserve_nbytes(state: MachineState) -> int:
    """To be free, beside activations."""
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
    """Have room made, if less than the reserve is free. ``lease``: of a runtime that grows."""
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
