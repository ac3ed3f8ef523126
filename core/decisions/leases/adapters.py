"""Adapters that do not all fit beside their backbone: which of a runtime's leases make room. Pure, on `MachineState`.

A lease whose function has an adapter holds it in its seat, beside the segments shared with other leases of its runtime.
When room is needed, a lease without sequences ends; if there is none, a lease without a turn leaves its seat, the one
that has been seated longest. Its runtime goes on with the others; its sequences wait, and keep their KV until that room
is needed. The lease asks for a turn again, and with it for its seat. So more adapters than fit are computed, in turn,
and none waits for another's last token.
"""

from collections.abc import Iterable

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import endings, reclaim
from dormouse.core.decisions.leases.held import SEATED, HeldLease, LeaseState
from dormouse.core.decisions.leases.state import MachineState
from dormouse.schemas import messages as m


def told_busy(state: MachineState, members: Iterable[HeldLease], busy: set[int]) -> None:
    """Its runtime has reported for which of its leases it has sequences."""
    for lease in members:
        if lease.serial in busy:
            lease.rests_s = None
        elif lease.rests_s is None:
            lease.rests_s = state.now_s


def end_one(state: MachineState) -> bool:
    """Ends the lease that has rested longest; returns False if none rests."""
    resting = [(lease.rests_s, lease.serial, lease) for lease in _paused(state) if lease.rests_s is not None]
    if not resting:
        return False
    reclaim.end_lease(state, min(resting)[-1])
    return True


def make_leave(state: MachineState) -> bool:
    """Has one lease leave its seat, if its runtime computes for others, too; returns False if there is none. A lease
    with granules of its own comes first; among leases that share granules, the last to leave frees them.
    """
    found: list[tuple[bool, float, int, HeldLease, list[int]]] = []
    for lease in _paused(state):
        if any(each is not lease and each.state in SEATED for each in state.members(lease.runtime)):
            own = endings.own_granules(state, lease)
            found.append((not own, lease.seated_s, lease.serial, lease, own))
    if not found:
        return False
    *_, lease, own = min(found)
    state.to(lease, LeaseState.LEAVING)
    lease.parts = True
    state.tell(lease, m.MemberLeaves(serial=lease.serial, granules=own, stays=True))
    return True


def left(state: MachineState, lease: HeldLease) -> None:
    """Its runtime has unmapped the segments that only this lease had."""
    if not lease.parts or lease.vacated:
        return
    lease.parts = False
    if lease.state is LeaseState.LEAVING:
        lease.vacated = True
        state.emit(o.Own(lease.serial))
    elif lease.state is LeaseState.CLOSING:
        endings.vacate(state, lease)


def lost(state: MachineState, lease: HeldLease, segments: Iterable[int]) -> bool:
    """Bytes that only this lease needs will not come: it ends, and its instance asks again. Other leases of its runtime
    go on. Returns False if there is no such lease.
    """
    if not lease.runtime or lease.state not in SEATED:
        return False
    others = [other for other in state.members(lease.runtime) if other is not lease and other.state in SEATED]
    theirs = set().union(*(state.instances[other.instance].segments for other in others))
    if not others or not theirs.isdisjoint(segments):
        return False
    lease.lost.update(segments)
    endings.close(state, lease, "revoked")
    return True


def want(state: MachineState) -> None:
    """Leases without a seat that have sequences ask for a turn, even while their runtime has one."""
    for lease in state.leases.values():
        books = state.runtimes.get(lease.runtime)
        if books is None or books.rests or lease.state is not LeaseState.AWAY or lease.rests_s is not None:
            continue
        if not lease.wants and lease.serial not in state.coming and state.adapted(lease.instance):
            lease.wants = True
            state.emit(m.WantsTurn(serial=lease.serial, due=books.due))


def _paused(state: MachineState) -> list[HeldLease]:
    paused = (lease for lease in state.leases.values() if lease.runtime and lease.state is LeaseState.PAUSED)
    return [lease for lease in paused if state.adapted(lease.instance)]
