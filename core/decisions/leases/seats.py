"""Seats: room for a model, and the choice of leases that leave when it is short. Pure, on `MachineState`."""

from collections.abc import Iterable

from dormouse.core.decisions.leases import adapters, endings, preloads, reclaim
from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.held import GOING, AttachedInstance, HeldLease, LeaseState
from dormouse.core.decisions.leases.state import MachineState
from dormouse.core.decisions.memory.pools.protocol import PoolChange
from dormouse.core.decisions.memory.wake_plan import ModelTooLarge, WakePlan
from dormouse.core.quantities import size
from dormouse.schemas import messages as m


def seat(state: MachineState, lease: HeldLease, instance: AttachedInstance, rates: e.WakeRates) -> WakePlan | None:
    """Makes room for its model; returns None if others have to leave first. If there are none, it has no model."""
    wake = lease.wake
    if any(other.state is LeaseState.LEAVING for other in state.leases.values()):
        return None  # a lease that takes the last free bytes before that seat is released has none for its computation
    if preloads.in_the_way(state, wake.instance):
        return None
    if reclaim.possible(state) and reclaim.cheaper(state, lease, state.residency.missing_nbytes(wake.instance)):
        return None
    while True:
        others = [other for other in state.leases.values() if state.residency.seated(other.instance)]
        try:
            plan = state.residency.wake(
                wake.instance,
                lambda: wake.worth,
                rates.slab,
                tenant=instance.tenant,
                reserve_nbytes=state.activations,
                wish_nbytes=wake.activation_nbytes if state.share else 0,
                alone=not others,
                roams=state.roams,
            )
            break
        except ModelTooLarge as error:
            state.arrange(error.plan)
            if not others:
                lease.refused = str(error)
                return WakePlan()
            if any(other.state in GOING for other in others):
                return None  # one of them will have left, or ended
            missing_nbytes = state.residency.missing_nbytes(wake.instance)
            if reclaim.any_left(state, missing_nbytes, wake.worth, lease.runtime):
                return None
            if adapters.end_one(state) or reclaim.end_one(state, lease.runtime):
                return None
            if reclaim.any_left(state, missing_nbytes, wake.worth):  # its own runtime's: no sequence waits for that
                return None
            if not (adapters.make_leave(state) or make_leave(state)):
                return None
    if plan.plans:
        state.arrange(*plan.plans, serial=lease.serial)
    if plan.missing:
        lease.missing_nbytes = {segment: nbytes for segment, _, nbytes in plan.missing}
        lease.copies = True
    return plan


def relieve(state: MachineState, event: e.Relieve) -> None:
    """Evicts every idle model; if that is not enough, has idle KV given back, then seats left that have no turn; or
    reports why not. A pool may need more room for a seat than its bytes: enough bytes may not suffice.
    """
    if preloads.give_up(state):
        state.relieving = event
        return
    residency = state.residency
    most_nbytes = residency.capacity - residency.fixed_nbytes
    beside_nbytes = min(event.beside_nbytes, state.use.now) if state.left else event.beside_nbytes
    lacking_nbytes = event.refused_nbytes + beside_nbytes - most_nbytes
    enough = state.share and lacking_nbytes <= 0
    plan = residency.relieve() if enough else PoolChange()
    if plan.evicted:
        state.arrange(plan)
        state.press()
    elif not (state.left and (enough or not state.share)):
        if state.share and reclaim.any_left(state, max(lacking_nbytes, event.refused_nbytes), {}):
            state.relieving = event
            return
        if make_leave(state, event):
            return
        if lent(state):
            state.relieving = event
            return
        if state.share and not enough:
            text = (
                f"With every idle model evicted there would be {size(most_nbytes)}; {size(beside_nbytes)} were in use, "
                f"{size(event.refused_nbytes)} asked for. So none was evicted."
            )
            answer(state, text)
            return
    answer(state, None if plan.evicted or state.left else "")


def answer(state: MachineState, value: str | None) -> None:
    state.relieving, state.left = None, False
    state.emit(o.ComputeAnswer(value))


def going(state: MachineState) -> bool:
    """Whether some lease's seat is about to be released."""
    return any(lease.state in GOING and state.residency.seated(lease.instance) for lease in state.leases.values())


def make_leave(state: MachineState, asked: e.Relieve | None = None) -> bool:
    """Have the seat left that has had no turn for longest; False if there is none. ``asked``: to be answered then.
    All leases of a runtime leave together: it has one mapping of the memory.
    """
    paused = [lease for lease in state.leases.values() if lease.state is LeaseState.PAUSED and _may_leave(state, lease)]
    if asked is not None:  # the compute thread waits: a lease that it has not begun with cannot leave
        paused = [lease for lease in paused if lease.reached or not lease.begun]
    if not paused:
        return False
    state.relieving = asked or state.relieving
    state.asks()
    lease = min(paused, key=lambda lease: lease.since_s)
    state.to(lease, LeaseState.LEAVING)
    if lease.runtime:
        for other in state.members(lease.runtime):
            if other.state is LeaseState.PAUSED:
                state.to(other, LeaseState.LEAVING)
        state.tell(lease, m.SeatEnds())
    elif lease.begun:
        state.emit(o.Own(lease.serial))
    else:
        away(state, lease)
    return True


def lent(state: MachineState) -> bool:
    """Whether some runtime has a step in another's turn: its seat can be left after that."""
    return any(books.lent for books in state.runtimes.values())


def _may_leave(state: MachineState, lease: HeldLease) -> bool:
    """Whether it may leave: not while its runtime computes for another, or in another's turn, or lets go of a lease."""
    still = (LeaseState.PAUSED, LeaseState.AWAY)
    if lease.runtime and state.runtimes[lease.runtime].lent:
        return False
    return not lease.runtime or all(
        other.state in still or (other.state is LeaseState.CLOSING and other.vacated)
        for other in state.members(lease.runtime)
    )


def begun(state: MachineState, event: e.Begun) -> None:
    if (lease := state.leases.get(event.serial)) is not None:
        lease.reached = True


def owned(state: MachineState, event: e.Owned) -> None:
    lease = state.leases.get(event.serial)
    if lease is None:
        return
    endings.brought(state, lease, event.left)
    if lease.state is not LeaseState.LEAVING:
        return
    if not event.storages:
        state.emit(o.CopyOut(lease.serial, [], [], spill=True))
        return
    endings.ask_places(state, lease, event.storages, None)


def copied_out(state: MachineState, event: e.CopiedOut) -> None:
    state.use = event.use
    lease = state.leases.get(event.serial)
    if event.spilled:
        if lease is not None and lease.state is LeaseState.LEAVING:
            away(state, lease)
        state.drop(event.dropped)
        return
    if lease is None or lease.writing is None or lease.state is not LeaseState.ENDING:
        return
    lease.writing.committed = True
    assert lease.writing.ended is not None
    state.emit(m.Written(ticket=lease.writing.ticket, freed=lease.writing.ended.freed))


def away(state: MachineState, lease: HeldLease) -> None:
    state.to(lease, LeaseState.AWAY)
    lease.refused = ""
    state.residency.leave(lease.instance)
    state.moved_away(lease.instance)
    state.room()


def returned(state: MachineState, event: e.SeatReturned) -> None:
    """Its storages in host memory are here again."""
    state.use = event.use
    lease = state.leases.get(event.serial)
    if lease is None or lease.state is LeaseState.CLOSING:
        return
    if event.refused:
        endings.give_up(state, lease)
        return
    if lease.writing is not None and lease.writing.ended is None:
        state.emit(m.LetGo(ticket=lease.writing.ticket))
        lease.writing = None


def may_write(state: MachineState, event: e.MayWrite) -> int | None:
    lease = state.leases[event.serial]
    instance = state.instances.get(lease.instance)
    return None if instance is None else state.residency.claim(lease.instance, event.segment, instance.tenant)


def came(state: MachineState, event: e.Came) -> None:
    if state.preload is not None and state.preload.serial == event.serial:
        preloads.came(state, state.preload, event)
        return
    lease = state.leases.get(event.serial)
    if event.lost and lease is not None and adapters.lost(state, lease, event.segments):
        return
    if lease is not None and lease.runtime and not lease.vacated:
        came = m.SegmentsCame(segments=list(event.segments), lost=event.lost)
        state.tell(lease, came)
        state.runtimes[lease.runtime].waits = False
    if not event.lost:
        for segment in event.segments:
            state.residency.arrived(segment)
    elif lease is not None and lease.copies:
        lease.lost.update(event.segments)
        state.moved_away(lease.instance)
        state.drop(event.segments)


def unmapped(state: MachineState, event: e.Unmapped) -> None:
    """Missing or moving segments are not there after all; the rest is as before."""
    if state.preload is not None and state.preload.serial == event.serial:
        state.preload.outcome = "refused"  # Brought follows
    lease = state.leases.get(event.serial)
    missing: Iterable[int] = ()
    if lease is not None and lease.copies:
        lease.copies, lease.refused, missing = False, event.text, lease.missing_nbytes
    for instance in state.instances.values():
        instance.bound = False
    state.drop([*missing, *event.moving])
