"""Steps in another's turn, as decisions/leases/runtimes.py lends them: pure. While a step of the runtime with the turn
waits for its weights, another runtime that has all of its own has a step: that which has had none for longest. The turn
stays where it is, and nobody else gets one while a step is lent.

A simulated step waits when all but the copies is done. A step that needs memory for KV which nobody has to spare is not
lent: it waits for its own turn.
"""

from collections.abc import Collection

from dormouse.controller.simulator.leases import SimulatedLease, seat_of
from dormouse.controller.simulator.streams.memory import KvMemory
from dormouse.controller.simulator.streams.runtime import runtime_of


def borrower(leases: Collection[SimulatedLease], memory: KvMemory) -> SimulatedLease | None:
    """Of those on a GPU where no step is lent, the one to have one."""
    for lease in leases:
        if lease.open and (runtime := lease.runtime) is not None and runtime.stepped:
            break
    else:
        return None
    able = [lease for lease in leases if _may_borrow(lease)]
    able.sort(key=lambda lease: seat_of(lease).paused_s or 0.0)
    return next((lease for lease in able if _fits(lease, memory)), None)


def _fits(lease: SimulatedLease, memory: KvMemory) -> bool:
    blocks = runtime_of(lease).batch.most_needed
    return not blocks or memory.plenty(lease, blocks)


def _may_borrow(lease: SimulatedLease) -> bool:
    runtime, seat = lease.runtime, lease.seat
    if runtime is None or seat is None or seat.paused_s is None:
        return False
    if seat.computing is not None or not seat.here or not runtime.batch.count:
        return False
    return not (runtime.fresh or runtime.yielding or runtime.stepped or lease.open or lease.extra_s)
