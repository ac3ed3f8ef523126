"""Growth of runtimes' KV: decides which leases make room for it, and what the runtime gets. Pure, on `MachineState`."""

from typing import Final

from dormouse.core.decisions.leases import adapters, offload, preloads, reclaim, seats
from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases.held import SEATED, TURN, HeldLease, LeaseState, RuntimeBooks
from dormouse.core.decisions.leases.state import MachineState
from dormouse.schemas import messages as m

MAX_EXTENTS: Final = 256
"""Most extents wanted at once: a runtime is not trusted with more."""


def seated(state: MachineState, books: RuntimeBooks) -> HeldLease | None:
    """One of its leases that has a seat, that with a turn first."""
    found = [lease for lease in state.members(books.name) if lease.state in SEATED]
    return min(found, key=lambda lease: lease.state not in TURN, default=None)


def grow(state: MachineState, books: RuntimeBooks, wanted: m.KvWanted) -> None:
    """Needed extents take memory from others. Wished extents take free memory, or idle memory if no adapter is away:
    that would have to come again. In another lease's turn, a runtime gets free or idle memory, and waits for nothing.
    """
    lease, count, nbytes = seated(state, books), wanted.extents, wanted.nbytes
    if lease is None:
        if members := state.members(books.name):
            state.tell(members[0], m.KvGiven(extents=[]))
        return
    if not 0 < count <= MAX_EXTENTS or not 0 <= wanted.wish <= MAX_EXTENTS or nbytes <= 0:
        state.tell(lease, m.KvGiven(extents=[]))
        return
    worth, all_nbytes = state.worth, count * nbytes
    mine = state.offload == "never" and books.running > 1  # a sequence alone could not go on
    asks = not mine and not books.lent
    if asks and reclaim.cheaper(state, lease, all_nbytes):
        books.kv_wanted = wanted
        return
    numbers = _grown(state, books, lease, count, nbytes, evict=not mine)
    if numbers is None:
        if asks and (
            preloads.give_up(state)
            or seats.going(state)
            or reclaim.any_left(state, all_nbytes, worth, books.name)
            or adapters.end_one(state)
            or reclaim.end_one(state, books.name)
            or adapters.make_leave(state)
            or seats.make_leave(state)
            or seats.lent(state)
        ):
            books.kv_wanted = wanted  # one of them will have left, or ended
        else:
            books.short = books.lent
            state.tell(lease, m.KvGiven(extents=[]))
        return
    away = any(each.state is LeaseState.AWAY for each in state.members(books.name))
    wished = _grown(state, books, lease, wanted.wish, nbytes, evict=not (mine or away)) if wanted.wish else None
    numbers += wished or ()
    state.emit(o.Mark(lease.serial, numbers))
    offload.grew(state, books, len(numbers) * nbytes)
    offload.ahead(state, lease)


def _grown(
    state: MachineState, books: RuntimeBooks, lease: HeldLease, count: int, nbytes: int, evict: bool
) -> list[int] | None:
    worth, owner = state.worth, books.kv_owner
    grown = state.residency.grow(
        owner, count, nbytes, lambda: worth, 1.0, owner=owner, reserve_nbytes=state.activations, evict=evict
    )
    if grown is None:
        return None
    numbers, plan = grown
    state.arrange(plan, serial=lease.serial)
    if plan.evicted:
        state.press()
    return numbers


def room(state: MachineState) -> None:
    """A seat was left: runtimes that wait for KV may have its memory."""
    for books in [books for books in state.runtimes.values() if books.kv_wanted is not None]:
        assert books.kv_wanted is not None
        wanted, books.kv_wanted = books.kv_wanted, None
        grow(state, books, wanted)
    growing = (lease for books in state.runtimes.values() if (lease := seated(state, books)) is not None)
    if (lease := next(growing, None)) is not None:
        offload.ahead(state, lease)
