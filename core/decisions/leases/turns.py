"""Turns: decides which leases may compute, and whose frames go to the compute thread. Pure, on `MachineState`."""

from collections.abc import Iterable
from typing import Final, assert_never

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import endings, gate, preloads, runtimes, seats
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.held import TURN, AttachedInstance, HeldLease, LeaseState
from dormouse.core.decisions.leases.state import MachineState
from dormouse.core.decisions.memory.wake_plan import WakePlan
from dormouse.schemas import messages as m

VERSION_S: Final = 5.0
"""Time that a lease may wait for the version of its model that its instance reports. The store sends a version to
executors before it sends it to the instance, so it is there in milliseconds; a version that never comes was made up,
and others wait.
"""


def next_turns(state: MachineState) -> None:
    """Begins with leases that wait for a turn, in order, as far as there are turns and their needs are met."""
    while state.coming:
        if sum(lease.state in TURN for lease in state.leases.values()) >= state.turns or seats.lent(state):
            return
        first = state.coming[0]
        began = resume(state, first) if isinstance(first, int) else begin(state, first)
        if not began:
            return
        state.coming.popleft()


def begin(state: MachineState, woken: e.WakeAsked) -> bool:
    """A new lease; False if it has to wait."""
    wake = woken.wake
    instance = state.instances.get(wake.instance)
    if instance is None:
        return False
    if _unknown(state, wake):
        if state.unknown is None or state.unknown[0] != wake.lease.serial:
            state.unknown = wake.lease.serial, state.now_s
        return False
    if instance.lease is not None or state.residency.coming(wake.instance):
        return False  # it is being closed; or others' copies bring shared segments
    runtime = runtimes.runtime_for(state, wake.instance, instance) if instance.llm else ""
    if runtime and not runtimes.may_begin(state, runtime):
        return False
    lease = HeldLease(
        wake,
        link_nbytes_s=woken.rates.slab,
        beside_nbytes=state.use.now,
        since_s=state.now_s,
        runtime=runtime,
    )
    plan = seats.seat(state, lease, instance, woken.rates)
    if plan is None:
        return False
    state.leases[lease.serial] = instance.lease = lease
    actions = state.gate.start(lease.serial, wake.lease.secret, wake.instance)
    if plan.missing or lease.refused or lease.runtime:
        tell_begin(state, lease, instance, plan, woken.rates)
    elif state.turns == 1 and instance.uses and not actions:
        lease.begun = True
        lease.frames = 1
        state.emit(o.Listen(begin_order(state, lease, instance, plan, None), state.now_s + state.turn_s))
    if lease.runtime:
        runtimes.seated(state, lease)
    else:
        state.ordinary_s = state.now_s
    admit(state, actions)
    return True


def _unknown(state: MachineState, wake: m.Wake) -> bool:
    """Whether its instance knows a newer version of its model than is known here."""
    manifest = state.manifests.get(wake.instance)
    return (manifest.version if manifest is not None else 0) < wake.version


def tell_begin(
    state: MachineState, lease: HeldLease, instance: AttachedInstance, plan: WakePlan, rates: e.WakeRates | None
) -> None:
    lease.begun = True
    state.emit(begin_order(state, lease, instance, plan, rates))


def begin_order(
    state: MachineState, lease: HeldLease, instance: AttachedInstance, plan: WakePlan, rates: e.WakeRates | None
) -> o.Begin:
    wake, places = lease.wake, None
    if not lease.refused and (plan.missing or not instance.bound):
        places = state.residency.places(wake.instance)
        instance.bound = not plan.missing and not lease.lost  # missing bytes stay lost to a lease that comes back
    if lease.refused:
        instance.bound = False
    peers = wake.peers if rates is not None and rates.peer > rates.slab else []
    secret = wake.lease.secret
    return o.Begin(lease.serial, secret, wake.instance, places, plan.missing, peers, lease.refused)


def pause(state: MachineState, serial: int) -> None:
    lease = state.leases.get(serial)
    if lease is None or lease.state is not LeaseState.RUNNING:
        return  # it has ended meanwhile, or is about to
    if lease.runtime:
        state.to(lease, LeaseState.YIELDING)
        if state.computing(lease.runtime):  # for another, which has a turn of its own
            state.to(lease, LeaseState.PAUSED)
        else:
            state.end_turn(lease)
        return
    state.gate.close(serial)
    state.to(lease, LeaseState.YIELDING if lease.frames else LeaseState.PAUSED)
    if lease.frames:
        state.emit(o.Recall(serial))


def resume(state: MachineState, serial: int) -> bool:
    """A lease that has lost its turn has one again; False if it has to wait."""
    lease = state.leases.get(serial)
    if lease is None or lease.state in (LeaseState.RUNNING, LeaseState.ENDING, LeaseState.CLOSING):
        return True
    if lease.state is LeaseState.LEAVING or (lease.runtime and state.runtimes[lease.runtime].owes):
        return False
    away = lease.state is LeaseState.AWAY
    if away:
        instance = state.instances[lease.instance]
        if state.newest(instance).version != instance.manifest.version:  # changed behind its lease's back
            endings.give_up(state, lease)
            return True
        if state.residency.coming(lease.instance):
            return False
        if lease.runtime and not runtimes.may_begin(state, lease.runtime):
            return False
        plan = seats.seat(state, lease, instance, e.WakeRates(1.0, 0.0))
        if plan is None:
            return False
        if lease.refused:
            endings.give_up(state, lease)
            return True
        if lease.begun:
            writing = lease.writing
            storages, places = ([], []) if writing is None else (writing.storages, writing.places or [])
            state.emit(o.Return(begin_order(state, lease, instance, plan, None), storages, places))
        elif plan.missing:
            tell_begin(state, lease, instance, plan, None)
        if lease.runtime:
            runtimes.seated(state, lease)
    state.to(lease, LeaseState.RUNNING)
    lease.since_s, lease.idle, lease.wants = state.now_s, False, False
    if lease.runtime:
        runtimes.turn_begins(state, lease)
        if not away:
            runtimes.may_be_anothers(state, lease)
    else:
        admit(state, state.gate.open(serial))
    return True


def tick(state: MachineState) -> None:
    for lease in state.leases.values():
        if may_idle(lease) and state.now_s >= lease.since_s + state.turn_s:
            lease.idle = True
            state.emit(m.Idle(serial=lease.serial))
    if state.unknown is not None and state.now_s >= state.unknown[1] + VERSION_S:
        (serial, _), state.unknown = state.unknown, None
        if (woken := waiting(state, serial)) is not None and _unknown(state, woken.wake):
            text = f"version {woken.wake.version} of its model, which the store does not know"
            give_up(state, woken, "violated")
            admit(state, state.gate.expel(woken.wake.instance, text))


def admit(state: MachineState, actions: Iterable[gate.Action], story: str = "") -> None:
    for action in actions:
        match action:
            case gate.Deliver():
                deliver(state, state.leases[action.serial], action.data)
            case gate.FrameKept():
                lease = state.leases[action.serial]
                if not lease.wants:
                    lease.wants = True
                    state.emit(m.WantsTurn(serial=action.serial))
            case gate.Refuse():
                state.refuse([action])
            case gate.Violate():
                state.emit(o.Expel(action.instance, action.text, story))
                endings.end_of(state, action.instance, "violated")
            case _:
                assert_never(action)


def deliver(state: MachineState, lease: HeldLease, data: bytes) -> None:
    if lease.state is LeaseState.CLOSING:
        return  # its instance is notified when it is over
    if not lease.begun:
        tell_begin(state, lease, state.instances[lease.instance], WakePlan(), None)
    if lease.idle:
        lease.idle = False
        preloads.give_up(state)
        state.emit(m.Busy(serial=lease.serial))
    alone = not lease.frames and state.turns == 1 and lease.state is LeaseState.RUNNING
    lease.frames += 1
    _use(state, lease)
    state.emit(o.Execute(lease.serial, data, lease.instance, alone))


def _use(state: MachineState, lease: HeldLease) -> None:
    lease.used = True
    if (instance := state.instances.get(lease.instance)) is not None:
        instance.uses = True


def not_lent(state: MachineState, serial: int) -> None:
    """Its frames come here; the compute thread gets the lease with the first."""
    lease = state.leases[serial]
    lease.begun = False
    lease.frames -= 1
    if (instance := state.instances.get(lease.instance)) is not None:
        instance.bound = False
    if lease.state is LeaseState.CLOSING:  # meanwhile; the compute thread will not say that it is
        endings.finish(state, lease)


def executed(state: MachineState, event: e.Executed) -> None:
    state.used(event.use, event.serial)
    lease = state.leases.get(event.serial)
    if lease is None:
        return
    state.gate.passed(event.serial, event.heard)
    state.gate.acknowledge(event.serial, event.frames)
    if event.replies:
        state.emit(o.Reply(lease.instance, b"".join(event.replies)))
    lease.frames -= 1
    lease.reached = True
    lease.busy_us += state.meter.busy(lease.instance, event.busy_s)
    if event.frames:
        if lease.said_unused:
            admit(state, state.gate.expel(lease.instance, "commands in a request that is said to have given none"))
        _use(state, lease)
        lease.since_s = state.now_s - event.idle_s
    if event.ended is not None:
        endings.ended(state, lease, event.ended, event.use)
    elif lease.state is LeaseState.YIELDING and not lease.frames:
        state.to(lease, LeaseState.PAUSED)


def may_idle(lease: HeldLease) -> bool:
    return lease.state is LeaseState.RUNNING and not lease.frames and not lease.idle and not lease.runtime


def over(state: MachineState, serials: Iterable[int]) -> None:
    """Their instances report that they have given the GPU nothing."""
    for serial in serials:
        lease = state.leases.get(serial)
        if lease is None and (woken := waiting(state, serial)) is not None:
            state.coming.remove(woken)
            admit(state, state.gate.skip(serial))
        if lease is None or lease.state is LeaseState.CLOSING:
            continue
        if not lease.used and (instance := state.instances.get(lease.instance)) is not None:
            instance.uses = False
        lease.said_unused = True
        if lease.used:
            admit(state, state.gate.expel(lease.instance, "commands in a request that is said to have given none"))
        elif lease.begun:
            endings.close(state, lease, "ended")
        else:
            endings.release(state, lease)


def revoke(state: MachineState, serial: int) -> None:
    if (woken := waiting(state, serial)) is not None:
        give_up(state, woken, "revoked")
    elif (lease := state.leases.get(serial)) is not None:
        endings.cut(state, lease, "revoked")


def give_up(state: MachineState, woken: e.WakeAsked, outcome: str) -> None:
    """There is nothing to undo, but its Done is owed, and its frames are late."""
    state.coming.remove(woken)
    admit(state, state.gate.skip(woken.wake.lease.serial))
    state.emit(endings.done(state, HeldLease(woken.wake, outcome=outcome)))


def waiting(state: MachineState, serial: int) -> e.WakeAsked | None:
    """A lease that has not begun."""
    wakes = (first for first in state.coming if isinstance(first, e.WakeAsked))
    return next((woken for woken in wakes if woken.wake.lease.serial == serial), None)


def next_deadline_s(state: MachineState) -> float | None:
    """Time at which to check whether a lease with a turn gives the GPU nothing."""
    leases = state.leases.values()
    due = [lease.since_s + state.turn_s for lease in leases if may_idle(lease)]
    if state.unknown is not None:
        due.append(state.unknown[1] + VERSION_S)
    return min(due, default=None)
