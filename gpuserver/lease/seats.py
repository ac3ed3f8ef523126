"""Seats: room for a model, and what happens when there is not enough for all. Pure, on `MachineState`."""

from collections.abc import Iterable

from dormouse.gpuserver.lease import effects as o
from dormouse.gpuserver.lease import endings
from dormouse.gpuserver.lease import events as e
from dormouse.gpuserver.lease.state import GOING, AttachedInstance, HeldLease, LeaseState, MachineState, Writing
from dormouse.gpuserver.lease.wake_plan import ModelTooLarge, WakePlan
from dormouse.gpuserver.pools.protocol import PoolChange
from dormouse.schemas import messages as m


def seat(b: MachineState, lease: HeldLease, instance: AttachedInstance, rates: e.WakeRates) -> WakePlan | None:
    """Room for its model, which others may have to leave first: then None. If there are none, it has no model."""
    wake = lease.wake
    while True:
        others = [other for other in b.leases.values() if b.residency.seated(other.instance)]
        try:
            plan = b.residency.wake(
                wake.instance,
                wake.worth,
                rates.slab,
                tenant=instance.tenant,
                reserve_nbytes=b.activations,
                wish_nbytes=wake.activation_nbytes if b.share else 0,
                alone=not others,
            )
            break
        except ModelTooLarge as error:
            b.arrange(error.plan)
            if not others:
                lease.refused = str(error)
                return WakePlan()
            if any(other.state in GOING for other in others) or not make_leave(b):
                return None  # one of them will have left, or ended
    if plan.plans:
        b.arrange(*plan.plans, serial=lease.serial)
    if plan.missing:
        lease.missing_nbytes = {segment: nbytes for segment, _, nbytes in plan.missing}
        lease.copies = True
    return plan


def relieve(b: MachineState, event: e.Relieve) -> None:
    """Evict every idle model, and have seats left that have no turn as long as that is not enough; or say why not."""
    residency = b.residency
    most_nbytes = residency.capacity - residency.fixed_nbytes
    beside_nbytes = min(event.beside_nbytes, b.use.now) if b.left else event.beside_nbytes
    enough = b.share and event.refused_nbytes + beside_nbytes <= most_nbytes
    if not enough and not (b.left and not b.share) and make_leave(b, event):
        return
    if b.share and not enough:
        answer(
            b,
            f"With every idle model evicted there would be {most_nbytes:,} bytes; {beside_nbytes:,} were in "
            f"use, {event.refused_nbytes:,} asked for. So none was evicted.",
        )
        return
    plan = residency.relieve() if b.share else PoolChange()
    if plan.evicted:
        b.arrange(plan)
        b.press()
    answer(b, None if plan.evicted or b.left else "")


def answer(b: MachineState, value: str | None) -> None:
    b.relieving, b.left = None, False
    b.emit(o.ComputeAnswer(value))


def make_leave(b: MachineState, asked: e.Relieve | None = None) -> bool:
    """Have the seat left that has had no turn for longest; False if there is none. ``asked``: to be answered then."""
    paused = [lease for lease in b.leases.values() if lease.state is LeaseState.PAUSED]
    if asked is not None:  # the compute thread waits: what it has not begun with cannot leave
        paused = [lease for lease in paused if lease.ran or not lease.begun]
    if not paused:
        return False
    b.relieving = asked or b.relieving
    lease = min(paused, key=lambda lease: lease.since_s)
    b.to(lease, LeaseState.LEAVING)
    if lease.begun:
        b.emit(o.Own(lease.serial))
    else:
        away(b, lease)
    return True


def owned(b: MachineState, event: e.Owned) -> None:
    lease = b.leases.get(event.serial)
    if lease is None:
        return
    endings.brought(b, lease, event.left)
    if lease.state is not LeaseState.LEAVING:
        return
    if not event.storages:
        b.emit(o.CopyOut(lease.serial, [], [], spill=True))
        return
    numbers = [storage for storage, _ in event.storages]
    lease.writing = Writing(next(b.tickets), None, numbers)
    ask = m.AskPlace(ticket=lease.writing.ticket, instance=lease.instance, storages=event.storages)
    b.emit(ask)


def copied_out(b: MachineState, event: e.CopiedOut) -> None:
    b.use = event.use
    lease = b.leases.get(event.serial)
    if event.spilled:
        if lease is not None and lease.state is LeaseState.LEAVING:
            away(b, lease)
        b.drop(event.dropped)
        return
    if lease is None or lease.writing is None or lease.state is not LeaseState.ENDING:
        return
    lease.writing.committed = True
    assert lease.writing.ended is not None
    b.emit(m.Written(ticket=lease.writing.ticket, freed=lease.writing.ended.freed))


def away(b: MachineState, lease: HeldLease) -> None:
    b.to(lease, LeaseState.AWAY)
    lease.refused = ""
    b.residency.leave(lease.instance)
    b.moved_away(lease.instance)
    b.room()


def returned(b: MachineState, event: e.SeatReturned) -> None:
    """What it had in host memory is here again."""
    b.use = event.use
    lease = b.leases.get(event.serial)
    if lease is None or lease.state is LeaseState.CLOSING:
        return
    if event.refused:
        endings.give_up(b, lease)
        return
    if lease.writing is not None and lease.writing.ended is None:
        b.emit(m.LetGo(ticket=lease.writing.ticket))
        lease.writing = None


def may_write(b: MachineState, event: e.MayWrite) -> int | None:
    lease = b.leases[event.serial]
    instance = b.instances.get(lease.instance)
    return None if instance is None else b.residency.claim(lease.instance, event.segment, instance.tenant)


def came(b: MachineState, event: e.Came) -> None:
    lease = b.leases.get(event.serial)
    if not event.lost:
        for segment in event.segments:
            b.residency.arrived(segment)
    elif lease is not None and lease.copies:
        lease.lost.update(event.segments)
        b.moved_away(lease.instance)
        b.drop(event.segments)


def unmapped(b: MachineState, event: e.Unmapped) -> None:
    """What was missing or moving is not there after all; the rest is as before."""
    lease = b.leases.get(event.serial)
    missing: Iterable[int] = ()
    if lease is not None and lease.copies:
        lease.copies, lease.refused, missing = False, event.text, lease.missing_nbytes
    for instance in b.instances.values():
        instance.bound = False
    b.drop([*missing, *event.moving])
