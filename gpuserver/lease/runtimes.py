"""Leases of runtimes: seats with KV that grows, and turns of steps. Pure, on `MachineState`.

A runtime's turn ends between two of its steps. The controller is told that the turn may be another's (Idle): at once,
if the runtime goes on in the seat that it has, for it computes one step in any case; else after its first step, without
which a seat would be had for nothing. If nobody wants the turn, the steps go on. So others wait for one step, which is
a brief one where they wait, or ordinary functions have computed lately. The seat ends when all is unmapped there, or
its runtime is dead.
"""

from collections.abc import Iterable
from typing import Final, assert_never

from dormouse.gpuserver.lease import effects as o
from dormouse.gpuserver.lease import endings, reclaim, seats
from dormouse.gpuserver.lease import events as e
from dormouse.gpuserver.lease.state import HeldLease, LeaseState, MachineState
from dormouse.schemas import messages as m

KV_OWNER: Final = "kv of "
"""With the instance's name: whose memory KV is. No other ever gets it without its being cleared."""

MOST_EXTENTS: Final = 256
"""Wanted at once; a runtime is not trusted with more."""

SHARED_S: Final = 10.0
"""An ordinary function that has computed is likely to come again for so long. Pieces of prompts cost a little; one that
comes less often meets a long step now and then.
"""

_SEATED: Final = (LeaseState.RUNNING, LeaseState.YIELDING, LeaseState.PAUSED)


def seated(state: MachineState, lease: HeldLease) -> None:
    """It has a seat. The runtime hears of that when the device is as the books say."""
    lease.vacated = False
    reclaim.forget(lease)
    state.emit(o.Mark(lease.serial, []))
    if lease.state is LeaseState.RUNNING:
        turn_begins(state, lease)


def turn_begins(state: MachineState, lease: HeldLease) -> None:
    others = any(other is not lease and (other.wants or not other.runtime) for other in state.leases.values())
    brief_s = SHARED_S if others else max(0.0, state.ordinary_s + SHARED_S - state.now_s)
    state.emit(o.ToRuntimeOf(lease.serial, lease.instance, m.TurnBegins(brief_ms=round(brief_s * 1000))))


def may_be_anothers(state: MachineState, lease: HeldLease) -> None:
    if not lease.idle:
        lease.idle = True
        state.emit(m.Idle(serial=lease.serial))


def marked(state: MachineState, event: e.Marked) -> None:
    """The compute thread has carried out what was planned for this seat, or for these extents of KV."""
    lease = state.leases.get(event.serial)
    if lease is None or lease.state not in _SEATED:
        return
    residency = state.residency
    if event.extents:
        extents = [(number, residency.pool.offset(number)) for number in event.extents]
        _give(state, lease, event.extents, writable=True)
        _tell(state, lease, m.KvGiven(extents=extents))
        return
    if not lease.refused:
        _give(state, lease, residency.places(lease.instance), writable=False)
    _tell(state, lease, _seat(state, lease))


def _give(state: MachineState, lease: HeldLease, segments: Iterable[int], writable: bool) -> None:
    granules = [m.GranuleAt(**each._asdict()) for each in state.residency.granules(segments)]
    _tell(state, lease, m.GranulesGiven(granules=granules, writable=writable))


def _seat(state: MachineState, lease: HeldLease) -> m.SeatGiven:
    if lease.refused:
        return m.SeatGiven(serial=lease.serial, storages=[], missing=[], refused=lease.refused)
    manifest, places = state.instances[lease.instance].manifest, state.residency.places(lease.instance)
    return m.SeatGiven(
        serial=lease.serial,
        storages=[
            m.StorageAt(
                storage=entry.storage,
                segment=entry.segment,
                offset=places[entry.segment][0] + entry.offset,
                nbytes=entry.nbytes,
            )
            for entry in manifest.entries
        ],
        missing=[segment for segment in places if state.residency.arriving(segment)],
    )


def said(state: MachineState, event: e.SaidByRuntime) -> None:
    lease = state.leases.get(event.serial)
    if lease is None:
        return
    match event.message:
        case m.SeatLeft():
            _left(state, lease)
        case m.TurnGivenBack(wants=wants):
            if lease.state is LeaseState.YIELDING:
                state.to(lease, LeaseState.PAUSED)
                if wants:
                    _want(state, lease)
        case m.Stepped(busy_us=busy_us, idle=idle):
            reclaim.told(lease, idle)
            lease.busy_s += busy_us / 1e6
            lease.ran = lease.used = True
            lease.since_s = state.now_s
            if lease.state is LeaseState.RUNNING:
                may_be_anothers(state, lease)
        case m.StepsWanted():
            if lease.state in (LeaseState.PAUSED, LeaseState.LEAVING, LeaseState.AWAY):
                _want(state, lease)
        case m.KvWanted(extents=count, nbytes=nbytes):
            _grow(state, lease, count, nbytes)
        case m.KvReturned() if state.residency.seated(lease.instance):
            reclaim.returned(state, lease, event.message)
        case m.KvReturned():
            pass  # its seat was left meanwhile, and that with it
        case _:
            assert_never(event.message)


def _want(state: MachineState, lease: HeldLease) -> None:
    if not lease.wants:
        lease.wants = True
        state.emit(m.WantsTurn(serial=lease.serial))


def _grow(state: MachineState, lease: HeldLease, count: int, nbytes: int) -> None:
    if lease.state not in _SEATED or not 0 < count <= MOST_EXTENTS or nbytes <= 0:
        _tell(state, lease, m.KvGiven(extents=[]))
        return
    worth, all_nbytes = lease.wake.worth, count * nbytes
    if reclaim.cheaper(state, lease, all_nbytes):
        lease.kv_wanted = count, nbytes
        return
    grown = state.residency.grow(
        lease.instance,
        count,
        nbytes,
        lambda: worth,
        1.0,
        owner=KV_OWNER + lease.instance,
        reserve_nbytes=state.activations,
    )
    if grown is None:
        if seats.going(state) or reclaim.any_left(state, all_nbytes, worth, lease.instance) or seats.make_leave(state):
            lease.kv_wanted = count, nbytes  # one of them will have left, or ended
        else:
            _tell(state, lease, m.KvGiven(extents=[]))
        return
    numbers, plan = grown
    state.arrange(plan, serial=lease.serial)
    state.emit(o.Mark(lease.serial, numbers))
    if plan.evicted:
        state.press()


def room(state: MachineState) -> None:
    """A seat was left: those that wait for KV may have it."""
    for lease in [lease for lease in state.leases.values() if lease.kv_wanted is not None]:
        assert lease.kv_wanted is not None
        (count, nbytes), lease.kv_wanted = lease.kv_wanted, None
        _grow(state, lease, count, nbytes)


def _left(state: MachineState, lease: HeldLease) -> None:
    """Nothing of the pool is mapped there any more: its KV is gone, and what waited for that goes on."""
    if lease.vacated or lease.state not in (LeaseState.LEAVING, LeaseState.CLOSING):
        return
    lease.vacated = True
    if state.residency.seated(lease.instance):
        state.drop(list(state.residency.claimed(lease.instance)))
    if lease.state is LeaseState.LEAVING:
        state.emit(o.Own(lease.serial))
    else:
        endings.shut(state, lease)


def unwanted(state: MachineState, event: e.SeatUnwanted) -> None:
    lease = state.leases.get(event.serial)
    if lease is not None and lease.state is not LeaseState.CLOSING:
        endings.close(state, lease, event.outcome)


def _tell(state: MachineState, lease: HeldLease, message: m.SeatGiven | m.KvGiven | m.GranulesGiven) -> None:
    state.emit(o.ToRuntimeOf(lease.serial, lease.instance, message))
