"""Models that are copied before any request for them: one at a time, and only while no lease computes. Pure, on
`MachineState`.

A model on its way is held as by a seat until its copies are over. It is given up for any wake or turn, for a runtime's
steps, and where memory is short: the chunk that is being copied ends, copied segments stay, and the rest is dropped. A
wake that needs room waits for that; one whose model is here does not.
"""

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.held import TURN, HeldPreload
from dormouse.core.decisions.leases.state import MachineState
from dormouse.core.decisions.memory.bringing import bring, owner_of
from dormouse.schemas import messages as m


def begin(state: MachineState, asked: e.PreloadAsked) -> bool:
    """Returns False if it does not begin. Nothing is kept free for KV: no runtime computes."""
    preload, rates = asked.preload, asked.rates
    name = preload.instance
    instance, manifest = state.instances.get(name), state.manifests.get(name)
    if instance is None or manifest is None or manifest.version < preload.version:
        _say(state, name, "failed")  # it is gone, or the store's manifest of it is still on its way
        return False
    busy = state.preload is not None or state.coming or instance.lease is not None or state.residency.coming(name)
    if busy or _computing(state):
        _say(state, name, "busy")
        return False
    worth = state.worth_here(preload.worth, name)
    plan = bring(
        state.residency,
        name,
        lambda: worth,
        rates.slab,
        tenant=instance.tenant,
        reserve_nbytes=state.activations,
        roams=state.roams,
    )
    if plan is None:
        _say(state, name, "refused")
        return False
    left_nbytes = {segment: nbytes for segment, _, nbytes in plan.missing}
    held = state.preload = HeldPreload(next(state.preloads), name, left_nbytes)
    state.arrange(*plan.plans, serial=held.serial)
    if not plan.missing:
        _end(state, held)
        return True
    peers = preload.peers if rates.peer > rates.slab else []
    state.emit(o.Bring(held.serial, plan.missing, peers))
    return True


def _computing(state: MachineState) -> bool:
    """Whether any lease computes, as far as is known."""
    for lease in state.leases.values():
        if lease.runtime:
            if not state.runtimes[lease.runtime].rests or state.residency.coming(lease.instance):
                return True
        elif lease.state not in TURN or not lease.idle:
            return True
    return False


def give_up(state: MachineState) -> bool:
    """The GPU has other work. Returns False if nothing was under way."""
    held = state.preload
    if held is None:
        return False
    if not held.stops:
        held.stops, held.outcome = True, "yielded"
        state.emit(o.StopBringing(held.serial))
    return True


def in_the_way(state: MachineState, instance: str) -> bool:
    """Whether a wake has to wait until the given-up copies have ended."""
    return state.preload is not None and state.residency.missing_nbytes(instance) > 0


def about(state: MachineState, instance: str) -> None:
    """The instance is gone, or its model is another one."""
    if state.preload is not None and state.preload.instance == instance:
        give_up(state)


def came(state: MachineState, held: HeldPreload, event: e.Came) -> None:
    for segment in event.segments:
        nbytes = held.left_nbytes.get(segment, 0)
        if not event.lost and segment in held.left_nbytes:
            del held.left_nbytes[segment]
            held.copied_nbytes += nbytes
        if not event.lost:
            state.residency.arrived(segment)


def brought(state: MachineState, event: e.Brought) -> None:
    held = state.preload
    if held is None or held.serial != event.serial:
        return
    there = [segment for segment in event.left.there if segment in held.left_nbytes]
    came(state, held, e.Came(held.serial, there))
    if held.left_nbytes and held.outcome == "there":
        held.outcome = "failed"
    _end(state, held)


def _end(state: MachineState, held: HeldPreload) -> None:
    """Drops segments that have not come, and those that no longer have an owner."""
    state.preload = None
    kept = state.residency.leave(owner_of(held.instance))
    state.drop(held.left_nbytes)
    state.arrange(state.residency.retire(kept))
    _say(state, held.instance, held.outcome, held)
    state.room()


def _say(state: MachineState, instance: str, outcome: str, held: HeldPreload | None = None) -> None:
    """Reports the outcome. Changed bytes are reported at the end of a preload: another may be on its way until then."""
    resident = [] if held is None else state.residency.changed()
    copied_nbytes = 0 if held is None else held.copied_nbytes
    said = m.Preloaded(
        instance=instance, outcome=outcome, copied_nbytes=copied_nbytes, resident=resident, stats=state.stats()
    )
    state.emit(said)
