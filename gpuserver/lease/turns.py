"""Turns: who may compute, and whose frames go to the compute thread. Pure, on `MachineState`."""

from collections.abc import Iterable
from typing import assert_never

from dormouse.gpuserver.lease import effects as o
from dormouse.gpuserver.lease import endings, gate, seats
from dormouse.gpuserver.lease import events as e
from dormouse.gpuserver.lease.state import TURN, AttachedInstance, HeldLease, LeaseState, MachineState
from dormouse.gpuserver.lease.wake_plan import WakePlan
from dormouse.schemas import messages as m


def next_turns(b: MachineState) -> None:
    """Begin with those that wait for a turn, in order, as far as there are turns and what they need is there."""
    while b.coming:
        if sum(lease.state in TURN for lease in b.leases.values()) >= b.turns:
            return
        first = b.coming[0]
        began = resume(b, first) if isinstance(first, int) else begin(b, first)
        if not began:
            return
        b.coming.popleft()


def begin(b: MachineState, woken: e.WakeAsked) -> bool:
    """A new lease; False if it has to wait."""
    wake = woken.wake
    instance, manifest = b.instances.get(wake.instance), b.manifests.get(wake.instance)
    if instance is None or (manifest.version if manifest is not None else 0) < wake.version:
        return False
    if instance.lease is not None or b.residency.coming(wake.instance):
        return False  # it is being closed; or others' copies bring what it shares
    lease = HeldLease(wake, beside_nbytes=b.use.now, since_s=b.now_s)
    plan = seats.seat(b, lease, instance, woken.rates)
    if plan is None:
        return False
    b.leases[lease.serial] = instance.lease = lease
    actions = b.gate.start(lease.serial, wake.lease.secret, wake.instance)
    if plan.missing or lease.refused:
        tell_begin(b, lease, instance, plan, woken.rates)
    admit(b, actions)
    return True


def tell_begin(
    b: MachineState, lease: HeldLease, instance: AttachedInstance, plan: WakePlan, rates: e.WakeRates | None
) -> None:
    lease.begun = True
    b.emit(begin_order(b, lease, instance, plan, rates))


def begin_order(
    b: MachineState, lease: HeldLease, instance: AttachedInstance, plan: WakePlan, rates: e.WakeRates | None
) -> o.Begin:
    wake, places = lease.wake, None
    if not lease.refused and (plan.missing or not instance.bound):
        places = b.residency.places(wake.instance)
        instance.bound = not plan.missing and not lease.lost  # what did not come stays lost to a lease that comes back
    if lease.refused:
        instance.bound = False
    peers = wake.peers if rates is not None and rates.peer > rates.slab else []
    secret = wake.lease.secret
    return o.Begin(lease.serial, secret, wake.instance, places, plan.missing, peers, lease.refused)


def pause(b: MachineState, serial: int) -> None:
    lease = b.leases.get(serial)
    if lease is None or lease.state is not LeaseState.RUNNING:
        return  # it has ended meanwhile, or is about to
    b.gate.close(serial)
    b.to(lease, LeaseState.YIELDING if lease.frames else LeaseState.PAUSED)
    if lease.frames:
        b.emit(o.Recall(serial))


def resume(b: MachineState, serial: int) -> bool:
    """A lease that has lost its turn has one again; False if it has to wait."""
    lease = b.leases.get(serial)
    if lease is None or lease.state in (LeaseState.RUNNING, LeaseState.ENDING, LeaseState.CLOSING):
        return True
    if lease.state is LeaseState.LEAVING:
        return False
    if lease.state is LeaseState.AWAY:
        instance = b.instances[lease.instance]
        if b.newest(instance).version != instance.manifest.version:  # it has changed its model behind its lease's back
            endings.give_up(b, lease)
            return True
        if b.residency.coming(lease.instance):
            return False
        plan = seats.seat(b, lease, instance, e.WakeRates(1.0, 0.0))
        if plan is None:
            return False
        if lease.refused:
            endings.give_up(b, lease)
            return True
        if lease.begun:
            writing = lease.writing
            storages, places = ([], []) if writing is None else (writing.storages, writing.places or [])
            b.emit(o.Return(begin_order(b, lease, instance, plan, None), storages, places))
        elif plan.missing:
            tell_begin(b, lease, instance, plan, None)
    b.to(lease, LeaseState.RUNNING)
    lease.since_s, lease.idle, lease.wants = b.now_s, False, False
    admit(b, b.gate.open(serial))
    return True


def tick(b: MachineState) -> None:
    for lease in b.leases.values():
        if may_idle(lease) and b.now_s >= lease.since_s + b.turn_s:
            lease.idle = True
            b.emit(m.Idle(serial=lease.serial))


def admit(b: MachineState, actions: Iterable[gate.Action], story: str = "") -> None:
    for action in actions:
        match action:
            case gate.Deliver():
                deliver(b, b.leases[action.serial], action.data)
            case gate.FrameKept():
                lease = b.leases[action.serial]
                if not lease.wants:
                    lease.wants = True
                    b.emit(m.WantsTurn(serial=action.serial))
            case gate.Refuse():
                b.emit(o.Reply(action.instance, gate.refusal(action.serial, action.reason)))
            case gate.Violate():
                b.emit(o.Expel(action.instance, action.text, story))
                endings.end_of(b, action.instance, "violated")
            case _:
                assert_never(action)


def deliver(b: MachineState, lease: HeldLease, data: bytes) -> None:
    if lease.state is LeaseState.CLOSING:
        return  # its instance is told when it is over
    if not lease.begun:
        tell_begin(b, lease, b.instances[lease.instance], WakePlan(), None)
    if lease.idle:
        lease.idle = False
        b.emit(m.Busy(serial=lease.serial))
    alone = not lease.frames and b.turns == 1 and lease.state is LeaseState.RUNNING
    lease.frames += 1
    lease.used = True
    b.emit(o.Execute(lease.serial, data, lease.instance, alone))


def executed(b: MachineState, event: e.Executed) -> None:
    b.use = event.use
    lease = b.leases.get(event.serial)
    if lease is None:
        return
    b.gate.passed(event.serial, event.followed)
    b.gate.acknowledge(event.serial, 1 + event.followed)
    if event.replies:
        b.emit(o.Reply(lease.instance, b"".join(event.replies)))
    lease.frames -= 1
    lease.ran = True
    lease.busy_s += event.busy_s
    lease.since_s = b.now_s - event.idle_s
    if event.ended is not None:
        endings.ended(b, lease, event.ended, event.use)
    elif lease.state is LeaseState.YIELDING and not lease.frames:
        b.to(lease, LeaseState.PAUSED)


def may_idle(lease: HeldLease) -> bool:
    return lease.state is LeaseState.RUNNING and not lease.frames and not lease.idle


def over(b: MachineState, serials: Iterable[int]) -> None:
    """Their instances say that they have given the GPU nothing."""
    for serial in serials:
        lease = b.leases.get(serial)
        if lease is None and (woken := waiting(b, serial)) is not None:
            b.coming.remove(woken)
            admit(b, b.gate.skip(serial))
        if lease is None or lease.state is LeaseState.CLOSING:
            continue
        if lease.used:
            admit(b, b.gate.expel(lease.instance, "commands in a request that is said to have given none"))
        elif lease.begun:
            endings.close(b, lease, "ended")
        else:
            endings.release(b, lease)


def revoke(b: MachineState, serial: int) -> None:
    if (woken := waiting(b, serial)) is not None:
        b.coming.remove(woken)  # nothing to undo, but its Done is owed, and its frames are late
        admit(b, b.gate.skip(serial))
        b.emit(endings.done(b, HeldLease(woken.wake, outcome="revoked")))
    elif (lease := b.leases.get(serial)) is not None:
        endings.cut(b, lease, "revoked")


def waiting(b: MachineState, serial: int) -> e.WakeAsked | None:
    """A lease that has not begun."""
    wakes = (first for first in b.coming if isinstance(first, e.WakeAsked))
    return next((woken for woken in wakes if woken.wake.lease.serial == serial), None)


def next_deadline_s(b: MachineState) -> float | None:
    """When it is to be looked whether somebody has a turn and gives the GPU nothing."""
    return min((lease.since_s + b.turn_s for lease in b.leases.values() if may_idle(lease)), default=None)
