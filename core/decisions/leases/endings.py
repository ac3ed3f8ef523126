"""Ends of leases: by END and write-back, or in the middle. Pure, on `MachineState`."""

from collections.abc import Iterable

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases import gate
from dormouse.core.decisions.leases.held import SEATED, HeldLease, LeaseState, Writing
from dormouse.core.decisions.leases.state import MachineState
from dormouse.core.decisions.memory.pools.protocol import PoolChange
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

NO_ROOM = (
    "others needed this GPU's memory while the request gave it nothing to do, and there is no room for what it had made"
)


NO_COUNTS = e.Counts()


def end_of(state: MachineState, name: str, outcome: str) -> None:
    """Ends the instance's current lease, if it has one."""
    instance = state.instances.get(name)
    if instance is not None and instance.lease is not None:
        cut(state, instance.lease, outcome)


def cut(state: MachineState, lease: HeldLease, outcome: str) -> None:
    """Ends it in the middle. Committed writes count: the manifest that is on its way ends the lease."""
    committed = lease.writing is not None and lease.writing.committed
    gone = lease.instance not in state.manifests or lease.instance not in state.instances
    if lease.state is not LeaseState.CLOSING and (gone or not committed or outcome != "revoked"):
        close(state, lease, outcome)


def close(state: MachineState, lease: HeldLease, outcome: str) -> None:
    """Closes it; nothing that it did is kept."""
    before = lease.state
    state.to(lease, LeaseState.CLOSING)
    lease.outcome = outcome
    if lease.runtime:
        _part(state, lease, before)
    else:
        shut(state, lease)


def _part(state: MachineState, lease: HeldLease, before: LeaseState) -> None:
    """Its runtime lets go of it; the lease goes on to its end when the seat is left. If other leases have seats there,
    their segments stay mapped: only its adapter is unmapped, and the turn may have to be given back.
    """
    own = [] if lease.vacated or before is LeaseState.LEAVING else own_granules(state, lease)
    state.tell(lease, m.MemberLeaves(serial=lease.serial, granules=own))
    if lease.vacated:
        shut(state, lease)
    elif before is LeaseState.LEAVING:
        pass  # it has been sent that order
    elif not any(other.state in SEATED and not other.refused for other in state.members(lease.runtime)):
        state.tell(lease, m.SeatEnds())
    else:
        lease.parts = bool(own)  # the turn may come back before that is unmapped
        if before is LeaseState.RUNNING and not state.computing(lease.runtime):
            state.end_turn(lease)
        elif before is not LeaseState.YIELDING and not own:
            vacate(state, lease)


def own_granules(state: MachineState, lease: HeldLease) -> list[int]:
    """Granules that are mapped for this lease of its runtime, and for no other lease that stays."""

    def of(instance: str) -> set[int]:
        known = state.instances.get(instance)
        if known is None or not state.residency.seated(instance):
            return set()
        here = (segment for segment in known.segments if segment in state.residency.pool)  # some may be lost
        return {granule.offset for granule in state.residency.pool.granules(here)}

    goes = (LeaseState.LEAVING, LeaseState.CLOSING)  # of two that share a granule, the later one names it
    stay = (each for each in state.members(lease.runtime) if each is not lease and each.state not in goes)
    others = (other.instance for other in stay if not other.vacated)
    return sorted(of(lease.instance).difference(*map(of, others)))


def vacate(state: MachineState, lease: HeldLease) -> None:
    """Nothing is mapped for it any more. If the compute thread waits for its seat, it cannot let go of the lease: it
    goes on without that seat.
    """
    lease.vacated = True
    state.drop(lease.lost)  # segments that have not come, and were mapped until now
    shut(state, lease)
    if state.relieving is not None:
        state.room()


def shut(state: MachineState, lease: HeldLease) -> None:
    """Has the compute thread let go of it."""
    if lease.begun:
        cancel = lease.outcome != "ended" or bool(lease.runtime)
        if cancel:
            state.emit(o.Skip(lease.serial))
        state.emit(o.Close(lease.serial, cancel=cancel))
    else:
        finish(state, lease)


def ended(state: MachineState, lease: HeldLease, ended: e.Ended, use: e.Use) -> None:
    """Its END has been executed."""
    brought(state, lease, ended.left)
    if lease.state is LeaseState.CLOSING and not ended.over:
        state.drop([*ended.dropped, *ended.claimed.values()])  # Closed follows, and names neither
        return
    lease.wrote = ended.wrote
    if ended.rebind:
        state.moved_away(lease.instance)
    if not ended.over:
        state.to(lease, LeaseState.ENDING)
        state.drop(ended.dropped)
        ask_places(state, lease, ended.storages, ended)
        return
    lease.outcome = "ended"
    finish(state, lease, ended.dropped, ended.used, ended.counts, use)


def ask_places(state: MachineState, lease: HeldLease, storages: list[tuple[int, int]], ended: e.Ended | None) -> None:
    """Asks for places for these storages: for write-back, after its END; without an END, for spilling, so that the
    lease can leave its seat.
    """
    lease.writing = Writing(next(state.tickets), ended, [storage for storage, _ in storages])
    state.emit(m.AskPlace(ticket=lease.writing.ticket, instance=lease.instance, storages=storages))


def closed(state: MachineState, event: e.Closed) -> None:
    state.used(event.use, event.serial)
    lease = state.leases.get(event.serial)
    if lease is None:
        return
    if event.replies:
        state.emit(o.Reply(lease.instance, b"".join(event.replies)))
    brought(state, lease, event.left)
    state.moved_away(lease.instance)  # the compute thread no longer has its written or freed storages
    for segment in event.kept:
        state.residency.arrived(segment)
    state.drop(segment for segment in lease.brought if segment not in event.kept)
    dropped = event.dropped
    if (writing := lease.writing) is not None:
        state.emit(m.LetGo(ticket=writing.ticket))
        dropped = [*dropped, *(writing.ended.claimed.values() if writing.ended is not None else ())]
    finish(state, lease, dropped, event.used, event.counts, event.use)


def placed(state: MachineState, placed: m.Placed) -> None:
    """Write to these places."""
    lease, writing = of_ticket(state, placed.ticket)
    if lease is None or writing is None:
        return  # revoked meanwhile; LetGo has given the ticket up
    writing.places = placed.places
    state.emit(o.CopyOut(lease.serial, writing.storages, placed.places, spill=writing.ended is None))


def place_refused(state: MachineState, refused: m.PlaceRefused) -> None:
    """The host has no room, or the tenant is over quota: the lease's writes are lost."""
    lease, writing = of_ticket(state, refused.ticket)
    if lease is None or writing is None:
        return
    lease.wrote = False
    if writing.ended is None:
        give_up(state, lease)
        return
    state.to(lease, LeaseState.CLOSING)
    state.emit(o.Close(lease.serial, cancel=False, refused=refused.text))


def of_ticket(state: MachineState, ticket: int) -> tuple[HeldLease | None, Writing | None]:
    for lease in state.leases.values():
        if lease.writing is not None and lease.writing.ticket == ticket and lease.state is not LeaseState.CLOSING:
            return lease, lease.writing
    return None, None


def written_back(state: MachineState, lease: HeldLease, writing: Writing) -> None:
    """The new manifest has come: segments written in place are resident under their new numbers. Other storages move
    into the pool, if there is room beside segments in use; else the next wake brings them from the host.
    """
    ended = writing.ended
    assert ended is not None
    residency, name = state.residency, lease.instance
    brought: list[tuple[int, int, int, int]] = []
    plans: list[PoolChange] = []
    tenant = state.instances[name].tenant
    for storage, place in zip(writing.storages, writing.places or (), strict=True):
        claimed = ended.claimed.get(storage)
        if claimed is not None:
            residency.rename(claimed, place.segment)
        elif residency.seated(name):  # else there is no room for its model
            plan = residency.adopt(name, place.segment, place.nbytes, state.activations, tenant)
            if plan is not None:
                plans.append(plan)
                brought.append((storage, place.segment, residency.pool.offset(place.segment), place.nbytes))
    state.arrange(*plans, serial=lease.serial)
    state.to(lease, LeaseState.CLOSING)
    lease.writing, lease.brought = None, [segment for _, segment, _, _ in brought]
    version = state.manifests[name].version
    state.emit(o.Close(lease.serial, cancel=False, version=version, brought=brought))


def brought(state: MachineState, lease: HeldLease, left: e.WakeRemains) -> None:
    """Its wake is over: copied segments are here. The others are not, unless they were given up and came for another
    lease.
    """
    if not lease.copies:
        return
    lease.copies = False
    for segment in left.there:
        state.residency.arrived(segment)
    lease.copied_nbytes += sum(lease.missing_nbytes[segment] for segment in left.there)
    lease.sources = left.sources
    lost = [segment for segment in left.lost if segment not in lease.lost]
    state.drop(lost)


def finish(
    state: MachineState,
    lease: HeldLease,
    dropped: Iterable[int] = (),
    used: Iterable[int] = (),
    counts: e.Counts = NO_COUNTS,
    use: e.Use | None = None,
) -> None:
    """The lease is over: sends its Done, and lets waiting leases go on."""
    instance = state.instances.get(lease.instance)
    if instance is not None and lease.outcome == "ended":
        tell_first_use(state, instance.manifest, used)
    release(state, lease)
    state.drop(dropped)
    peak_nbytes = 0 if use is None else max(0, use.peak - lease.beside_nbytes)
    state.emit(done(state, lease, peak_nbytes, counts))
    state.room()


def release(state: MachineState, lease: HeldLease) -> None:
    """It has no seat any more."""
    name = lease.instance
    del state.leases[lease.serial]
    held = state.residency.leave(name)
    if lease.runtime and not state.members(lease.runtime):
        state.residency.leave(state.runtimes.pop(lease.runtime).kv_owner)
    instance = state.instances.get(name)
    if not lease.runtime:
        state.ordinary_s = state.now_s
    if instance is None:
        state.arrange(state.residency.retire(held))
    else:
        instance.lease = None
        if state.newest(instance) is not instance.manifest:
            state.adopt(name)
            state.arrange(state.residency.retire(held))
    state.refuse(state.gate.end(lease.serial))


def done(state: MachineState, lease: HeldLease, peak_nbytes: int = 0, counts: e.Counts = NO_COUNTS) -> m.Done:
    instance, manifest = state.instances.get(lease.instance), state.manifests.get(lease.instance)
    if manifest is None and instance is not None:
        manifest = instance.manifest
    return m.Done(
        serial=lease.serial,
        outcome=lease.outcome,
        gpu_us=lease.busy_us,
        copied_nbytes=lease.copied_nbytes,
        peer_nbytes=lease.sources.peer_nbytes,
        file_nbytes=lease.sources.file_nbytes,
        resident=state.residency.changed(),
        peak_activation_nbytes=peak_nbytes,
        version=manifest.version if manifest is not None else 0,
        stats=state.stats(),
        wrote=lease.wrote and lease.outcome == "ended",
        peers=lease.sources.gave,
        repaired=counts.repaired,
        replayed=counts.replayed,
    )


def tell_first_use(state: MachineState, manifest: m.Manifest, used: Iterable[int]) -> None:
    """Sends the store the order in which segments were first used, so that the next wake copies them in it."""
    known = [segment for segment, _ in manifest.segments]
    there = set(known)
    order = [segment for segment in used if segment in there]
    if len(order) > len(known) // 2 and known[: len(order)] != order:
        state.emit(m.FirstUse(instance=manifest.instance, version=manifest.version, segments=order))


def give_up(state: MachineState, lease: HeldLease) -> None:
    """It can neither have a seat nor keep what it has made."""
    if not lease.runtime:
        state.emit(o.Reply(lease.instance, gate.refusal(lease.serial, NO_ROOM, wire.SEAT_LOST)))
    close(state, lease, "revoked")
