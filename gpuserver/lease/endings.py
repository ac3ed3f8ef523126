"""How leases end: by their END and its write-back, or in the middle. Pure, on `MachineState`."""

from collections.abc import Iterable

from dormouse.gpuserver.lease import effects as o
from dormouse.gpuserver.lease import events as e
from dormouse.gpuserver.lease import gate
from dormouse.gpuserver.lease.state import HeldLease, LeaseState, MachineState, Writing
from dormouse.gpuserver.pools.protocol import PoolChange
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

NO_ROOM = (
    "others needed this GPU's memory while the request gave it nothing to do, and there is no room for what it had made"
)


def end_of(b: MachineState, name: str, outcome: str) -> None:
    """Whatever lease the instance has."""
    instance = b.instances.get(name)
    if instance is not None and instance.lease is not None:
        cut(b, instance.lease, outcome)


def cut(b: MachineState, lease: HeldLease, outcome: str) -> None:
    """In the middle. What has been committed is: the manifest, which is on its way, ends it."""
    committed = lease.writing is not None and lease.writing.committed
    gone = lease.instance not in b.manifests or lease.instance not in b.instances
    if lease.state is not LeaseState.CLOSING and (gone or not committed or outcome != "revoked"):
        close(b, lease, outcome)


def close(b: MachineState, lease: HeldLease, outcome: str) -> None:
    """It keeps nothing of what it did."""
    b.to(lease, LeaseState.CLOSING)
    lease.outcome = outcome
    if lease.begun:
        if outcome != "ended":
            b.emit(o.Skip(lease.serial))
        b.emit(o.Close(lease.serial, cancel=outcome != "ended"))
    else:
        finish(b, lease)


def ended(b: MachineState, lease: HeldLease, ended: e.Ended, use: e.Use) -> None:
    """Its END has been executed."""
    brought(b, lease, ended.left)
    if lease.state is LeaseState.CLOSING and not ended.over:
        b.drop([*ended.dropped, *ended.claimed.values()])  # Closed follows, and names neither
        return
    lease.wrote = ended.wrote
    if ended.rebind:
        b.moved_away(lease.instance)
    if not ended.over:
        b.to(lease, LeaseState.ENDING)
        b.drop(ended.dropped)
        numbers = [storage for storage, _ in ended.storages]
        lease.writing = Writing(next(b.tickets), ended, numbers)
        ask = m.AskPlace(ticket=lease.writing.ticket, instance=lease.instance, storages=ended.storages)
        b.emit(ask)
        return
    lease.outcome = "ended"
    finish(b, lease, ended.dropped, ended.used, ended.repaired, use)


def closed(b: MachineState, event: e.Closed) -> None:
    b.use = event.use
    lease = b.leases.get(event.serial)
    if lease is None:
        return
    if event.replies:
        b.emit(o.Reply(lease.instance, b"".join(event.replies)))
    brought(b, lease, event.left)
    b.moved_away(lease.instance)  # what it wrote, or freed, is where the compute thread has it no more
    for segment in event.kept:
        b.residency.arrived(segment)
    b.drop(segment for segment in lease.brought if segment not in event.kept)
    dropped = event.dropped
    if (writing := lease.writing) is not None:
        b.emit(m.LetGo(ticket=writing.ticket))
        dropped = [*dropped, *(writing.ended.claimed.values() if writing.ended is not None else ())]
    finish(b, lease, dropped, event.used, event.repaired, event.use)


def placed(b: MachineState, placed: m.Placed) -> None:
    """Write to these places."""
    lease, writing = of_ticket(b, placed.ticket)
    if lease is None or writing is None:
        return  # revoked meanwhile; LetGo has given the ticket up
    writing.places = placed.places
    b.emit(o.CopyOut(lease.serial, writing.storages, placed.places, spill=writing.ended is None))


def place_refused(b: MachineState, refused: m.PlaceRefused) -> None:
    """No room on the host, or over quota: what the lease wrote is gone."""
    lease, writing = of_ticket(b, refused.ticket)
    if lease is None or writing is None:
        return
    lease.wrote = False
    if writing.ended is None:
        give_up(b, lease)
        return
    b.to(lease, LeaseState.CLOSING)
    b.emit(o.Close(lease.serial, cancel=False, refused=refused.text))


def of_ticket(b: MachineState, ticket: int) -> tuple[HeldLease | None, Writing | None]:
    for lease in b.leases.values():
        if lease.writing is not None and lease.writing.ticket == ticket and lease.state is not LeaseState.CLOSING:
            return lease, lease.writing
    return None, None


def written_back(b: MachineState, lease: HeldLease, writing: Writing) -> None:
    """The new manifest is there: what was written in place is resident under its new segment, the rest moves into
    the pool, if there is room beside what is in use; else the next wake brings it from the host.
    """
    ended = writing.ended
    assert ended is not None
    residency, name = b.residency, lease.instance
    brought: list[tuple[int, int, int, int]] = []
    plans: list[PoolChange] = []
    tenant = b.instances[name].tenant
    for storage, place in zip(writing.storages, writing.places or (), strict=True):
        claimed = ended.claimed.get(storage)
        if claimed is not None:
            residency.rename(claimed, place.segment)
        elif residency.seated(name):  # else there is no room for its model
            plan = residency.adopt(name, place.segment, place.nbytes, b.activations, tenant)
            if plan is not None:
                plans.append(plan)
                brought.append((storage, place.segment, residency.pool.offset(place.segment), place.nbytes))
    b.arrange(*plans, serial=lease.serial)
    b.to(lease, LeaseState.CLOSING)
    lease.writing, lease.brought = None, [segment for _, segment, _, _ in brought]
    version = b.manifests[name].version
    b.emit(o.Close(lease.serial, cancel=False, version=version, brought=brought))


def brought(b: MachineState, lease: HeldLease, left: e.WakeRemains) -> None:
    """Its wake is over: what has arrived is here, the rest is not, unless it was given up and came for another."""
    if not lease.copies:
        return
    lease.copies = False
    for segment in left.there:
        b.residency.arrived(segment)
    lease.copied_nbytes += sum(lease.missing_nbytes[segment] for segment in left.there)
    lease.sources = left.sources
    lost = [segment for segment in left.lost if segment not in lease.lost]
    b.drop(lost)


def finish(
    b: MachineState,
    lease: HeldLease,
    dropped: Iterable[int] = (),
    used: Iterable[int] = (),
    repaired: int = 0,
    use: e.Use | None = None,
) -> None:
    """The lease is over: its Done, and what waited for that."""
    instance = b.instances.get(lease.instance)
    if instance is not None and lease.outcome == "ended":
        tell_first_use(b, instance.manifest, used)
    release(b, lease)
    b.drop(dropped)
    peak_nbytes = 0 if use is None else max(0, use.peak - lease.beside_nbytes)
    b.emit(done(b, lease, peak_nbytes, repaired))
    b.room()


def release(b: MachineState, lease: HeldLease) -> None:
    """It has no seat any more."""
    name = lease.instance
    del b.leases[lease.serial]
    held = b.residency.leave(name)
    instance = b.instances.get(name)
    if instance is None:
        b.arrange(b.residency.retire(held))
    else:
        instance.lease = None
        if b.newest(instance) is not instance.manifest:
            b.adopt(name)
            b.arrange(b.residency.retire(held))
    b.refuse(b.gate.end(lease.serial))


def done(b: MachineState, lease: HeldLease, peak_nbytes: int = 0, repaired: int = 0) -> m.Done:
    instance, manifest = b.instances.get(lease.instance), b.manifests.get(lease.instance)
    if manifest is None and instance is not None:
        manifest = instance.manifest
    return m.Done(
        serial=lease.serial,
        outcome=lease.outcome,
        gpu_us=int(lease.busy_s * 1e6),
        copied_nbytes=lease.copied_nbytes,
        peer_nbytes=lease.sources.peer_nbytes,
        file_nbytes=lease.sources.file_nbytes,
        resident=b.residency.changed(),
        peak_activation_nbytes=peak_nbytes,
        version=manifest.version if manifest is not None else 0,
        stats=b.stats(),
        wrote=lease.wrote and lease.outcome == "ended",
        peers=lease.sources.gave,
        repaired=repaired,
    )


def tell_first_use(b: MachineState, manifest: m.Manifest, used: Iterable[int]) -> None:
    """Let the store know the order in which segments were needed, so that the next wake copies them in it."""
    known = [segment for segment, _ in manifest.segments]
    there = set(known)
    order = [segment for segment in used if segment in there]
    if len(order) > len(known) // 2 and known[: len(order)] != order:
        told = m.FirstUse(instance=manifest.instance, version=manifest.version, segments=order)
        b.emit(told)


def give_up(b: MachineState, lease: HeldLease) -> None:
    """It cannot have a seat, nor keep what it has made."""
    refusal = gate.refusal(lease.serial, NO_ROOM, wire.SEAT_LOST)
    b.emit(o.Reply(lease.instance, refusal))
    close(b, lease, "revoked")
