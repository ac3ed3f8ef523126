"""Decides what becomes of the leases on one GPU: pure, no torch, no lock, no clock. The executor's thread alone has it.

A lease begins with a *seat*, the right to space: its model stays, and what it makes. And with a *turn*, the right to
compute; there are one or two of them. Its states, and what leads from one to the next::

    RUNNING   seat and turn         Pause -> YIELDING    END -> ENDING or over     Over, Revoke ... -> CLOSING or over
    YIELDING  its last frames run   the last has run -> PAUSED                     (as RUNNING)
    PAUSED    a seat, no turn       Turn -> RUNNING      others need room -> LEAVING    (as RUNNING)
    LEAVING   to host memory        CopiedOut -> AWAY    no room there -> CLOSING       (as RUNNING)
    AWAY      no seat               Turn -> RUNNING      no room here -> CLOSING        (as RUNNING)
    ENDING    written back          the new manifest -> CLOSING                    Revoke before Written -> CLOSING
    CLOSING   the compute thread lets go of it           Closed -> over

Each lease has one Done, but those without a trace that Over ends. The controller's word on turns is law at the next
boundary of frames; what an instance sends without a turn waits at the gate.
"""

from typing import assert_never

from dormouse.gpuserver.lease import effects as o
from dormouse.gpuserver.lease import endings, seats, turns
from dormouse.gpuserver.lease import events as e
from dormouse.gpuserver.lease.residency import Residency
from dormouse.gpuserver.lease.state import TURN, AttachedInstance, HeldLease, LeaseState, MachineState
from dormouse.gpuserver.pools.protocol import Pool
from dormouse.schemas import messages as m


class Machine:
    """Of one GPU. ``handle`` is the way in, its effects the way out.

    Args:
        share: whether activations take their memory from what models leave.
        turns: how many may compute side by side.
        turn_s: after so long without a command the controller is told.
    """

    def __init__(self, pool: Pool, *, share: bool, turns: int = 1, turn_s: float = 0.02) -> None:
        self._books = MachineState(pool, share, turns, turn_s)

    @property
    def residency(self) -> Residency:
        return self._books.residency

    @property
    def leases(self) -> dict[int, HeldLease]:
        """In progress, by serial."""
        return self._books.leases

    def stats(self) -> m.PoolStats:
        """What the memory is used for."""
        return self._books.stats()

    @property
    def next_deadline_s(self) -> float | None:
        """When a Tick is due."""
        return turns.next_deadline_s(self._books)

    def handle(self, event: e.Event, now_s: float) -> list[o.Effect]:
        """Everything that is to be done because of ``event``, in order."""
        b = self._books
        b.now_s = now_s
        match event:
            case e.Heard():
                turns.admit(b, b.gate.frame(event.instance, event.data))
            case e.Executed():
                turns.executed(b, event)
            case e.WakeAsked():
                turns.over(b, event.wake.over)
                b.coming.append(event)
            case m.Over():
                turns.over(b, event.serials)
            case m.Turn():
                if event.serial in b.leases:
                    b.coming.append(event.serial)
            case m.Pause():
                turns.pause(b, event.serial)
            case m.Revoke():
                turns.revoke(b, event.serial)
            case e.Closed():
                endings.closed(b, event)
            case e.Escaped():
                if event.story:
                    b.residency.check()
                turns.admit(b, b.gate.expel(event.instance, event.text), event.story)
                endings.end_of(b, event.instance, "violated")
            case e.Expelled():
                turns.admit(b, b.gate.expel(event.instance, event.text))
            case e.MayWrite():
                b.emit(o.ComputeAnswer(seats.may_write(b, event)))
            case e.Relieve():
                seats.relieve(b, event)
            case m.Manifest():
                _manifest(b, event)
            case m.Dropped():
                _dropped(b, event.instance)
            case m.Placed():
                endings.placed(b, event)
            case m.PlaceRefused():
                endings.place_refused(b, event)
            case e.Owned():
                seats.owned(b, event)
            case e.CopiedOut():
                seats.copied_out(b, event)
            case e.SeatReturned():
                seats.returned(b, event)
            case e.Unmapped():
                seats.unmapped(b, event)
            case e.Moved():
                for segment in event.segments:
                    b.residency.arrived(segment)
            case e.Came():
                seats.came(b, event)
            case e.Forgotten():
                b.arrange(b.residency.retire(event.segments))
            case e.InstanceAttached():
                _attached(b, event)
            case e.Detached():
                _detached(b, event.instance)
            case e.Tick():
                turns.tick(b)
            case _:
                assert_never(event)
        while b.look_again and b.relieving is not None:
            b.look_again = False
            seats.relieve(b, b.relieving)
        if b.coming:
            turns.next_turns(b)
        out, b.out = b.out, []
        return out

    def check(self) -> None:
        """Assert what holds between any two events."""
        b = self._books
        b.residency.check()
        computing = [lease for lease in b.leases.values() if lease.state in TURN]
        assert len(computing) <= b.turns
        for serial, lease in b.leases.items():
            assert lease.serial == serial
            assert lease.frames >= 0
            if lease.state is not LeaseState.CLOSING:
                assert b.instances[lease.instance].lease is lease
            assert lease.state is not LeaseState.AWAY or not b.residency.seated(lease.instance), "away on a seat"
            if lease.state in (*TURN, LeaseState.PAUSED, LeaseState.LEAVING, LeaseState.ENDING) and not lease.refused:
                assert b.residency.seated(lease.instance), "no seat"
            assert lease.state is not LeaseState.PAUSED or not lease.frames, "paused in the middle of a frame"


def _attached(b: MachineState, event: e.InstanceAttached) -> None:
    b.gate.attach(event.instance)
    empty = m.Manifest(instance=event.instance, version=0, entries=[], segments=[])
    b.instances[event.instance] = AttachedInstance(event.tenant, empty)
    b.adopt(event.instance)


def _detached(b: MachineState, instance: str) -> None:
    b.gate.detach(instance)
    b.manifests.pop(instance, None)  # first: none that is on its way can end the lease
    endings.end_of(b, instance, "revoked")
    for woken in [first for first in b.coming if isinstance(first, e.WakeAsked) and first.wake.instance == instance]:
        turns.revoke(b, woken.wake.lease.serial)
    b.instances.pop(instance, None)
    b.emit(o.Detach(instance))
    b.arrange(b.residency.retire(b.residency.unlearn(instance)))


def _manifest(b: MachineState, manifest: m.Manifest) -> None:
    """A newer version, or the same one in a better order: adopted at once, or when the instance's lease ends."""
    name, residency = manifest.instance, b.residency
    known = b.manifests.get(name)
    if known is not None and known.version > manifest.version:
        return
    before_nbytes = residency.resident_nbytes(name)
    b.manifests[name] = manifest
    before = residency.learn(manifest)
    instance = b.instances.get(name)
    lease = instance.lease if instance is not None else None
    if lease is None and residency.resident_nbytes(name) > before_nbytes:
        b.press()  # others have its segments here: who places its requests should know before the first of them
    if lease is None:
        b.adopt(name)
    elif (writing := lease.writing) is not None and writing.committed and lease.state is LeaseState.ENDING:
        newer = manifest.version > b.instances[name].manifest.version  # and not only in a better order
        placed = {place.segment for place in writing.places or ()}
        if newer and placed <= {segment for segment, _ in manifest.segments}:
            endings.written_back(b, lease, writing)
    b.arrange(residency.retire(before))  # what only a version had that this instance was never bound to


def _dropped(b: MachineState, name: str) -> None:
    """The store has no manifest of it any more."""
    b.manifests.pop(name, None)
    endings.end_of(b, name, "revoked")
    segments = b.residency.unlearn(name)
    if (instance := b.instances.get(name)) is not None and instance.lease is None:
        b.adopt(name)
    b.arrange(b.residency.retire(segments))
