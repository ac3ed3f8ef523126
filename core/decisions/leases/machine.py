"""Decides the state of each lease on one GPU: pure, no torch, no lock, no clock. Used by the executor's thread alone.

A lease begins with a *seat*, the right to space for its model and for its results, and with a *turn*, the right to
compute; there are one or two turns. `NEXT` (state.py) has the states and their transitions; docs/design/lease.md draws
them with their causes.

Each lease has one Done, except those that Over ends without a trace. The controller's decisions on turns take effect at
the next boundary of frames; frames that an instance sends without a turn wait at the gate.
"""

from collections.abc import Mapping
from typing import assert_never

from msgspec import structs

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import endings, growth, preloads, reclaim, runtimes, seats, turns
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.held import TURN, AttachedInstance, HeldLease, LeaseState
from dormouse.core.decisions.leases.state import MachineState
from dormouse.core.decisions.memory.bringing import owner_of
from dormouse.core.decisions.memory.pools.protocol import Pool
from dormouse.core.decisions.memory.residency import Residency
from dormouse.schemas import messages as m


class Machine:
    """The leases of one GPU. ``handle`` is the way in, its effects the way out.

    Args:
        share: whether activations take their memory from the rest that models leave.
        turns: how many may compute side by side.
        turn_s: time without a command after which the controller is notified.
        seat_idle_s: time without a sequence after which a runtime's seat ends, though the room is not needed.
        offload: when others make room for KV, as in schemas/policy.py.
        quotas: bytes that tenants may keep here before all others.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        share: bool,
        turns: int = 1,
        turn_s: float = 0.02,
        seat_idle_s: float = 600.0,
        offload: str = "asked",
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        self._state = MachineState(pool, share, turns, turn_s, seat_idle_s, offload, quotas)

    @property
    def residency(self) -> Residency:
        return self._state.residency

    @property
    def leases(self) -> dict[int, HeldLease]:
        """In progress, by serial."""
        return self._state.leases

    def stats(self) -> m.PoolStats:
        """Memory of the pool by use."""
        return self._state.stats()

    @property
    def next_deadline_s(self) -> float | None:
        """Time at which a Tick is due."""
        state = self._state
        due = turns.next_deadline_s(state), reclaim.next_deadline_s(state), state.meter.due_s
        return min((due_s for due_s in due if due_s is not None), default=None)

    def handle(self, event: e.Event, now_s: float) -> list[o.Effect]:
        """Returns everything that is to be done because of ``event``, in order."""
        state = self._state
        state.now_s = now_s
        state.meter.at(now_s)
        match event:
            case e.Heard():
                turns.admit(state, state.gate.frame(event.instance, event.data))
            case e.Executed():
                turns.executed(state, event)
            case e.NotLent():
                turns.not_lent(state, event.serial)
            case e.WakeAsked():
                state.worth = state.worth_here(event.wake.worth, event.wake.instance)
                turns.over(state, event.wake.over)
                if state.quotas:
                    event = structs.replace(event, wake=structs.replace(event.wake, worth=state.worth))
                state.coming.append(event)
            case e.PreloadAsked():
                if preloads.begin(state, event):
                    runtimes.open_ahead(state, event.preload.instance)
            case m.StopPreload():
                preloads.give_up(state)
            case m.DrainSeats(on=on):
                state.drains = on
            case m.DropModel():
                _unload(state, event)
            case e.Brought():
                preloads.brought(state, event)
            case m.Over():
                turns.over(state, event.serials)
            case m.Turn():
                if event.serial in state.leases:
                    state.coming.append(event.serial)
            case m.Pause():
                turns.pause(state, event.serial)
            case m.Revoke():
                turns.revoke(state, event.serial)
            case e.Closed():
                endings.closed(state, event)
            case e.Escaped():
                if event.story:
                    state.residency.check()
                turns.admit(state, state.gate.expel(event.instance, event.text), event.story)
                endings.end_of(state, event.instance, "violated")
            case e.Expelled():
                turns.admit(state, state.gate.expel(event.instance, event.text))
            case e.MayWrite():
                state.emit(o.ComputeAnswer(seats.may_write(state, event)))
            case e.Relieve():
                seats.relieve(state, event)
            case m.Manifest():
                _manifest(state, event)
            case m.Dropped():
                _dropped(state, event.instance)
            case m.Placed():
                endings.placed(state, event)
            case m.PlaceRefused():
                endings.place_refused(state, event)
            case e.Owned():
                seats.owned(state, event)
            case e.CopiedOut():
                seats.copied_out(state, event)
            case e.SeatReturned():
                seats.returned(state, event)
            case e.Unmapped():
                seats.unmapped(state, event)
            case e.Came():
                seats.came(state, event)
            case e.Begun():
                seats.begun(state, event)
            case e.Forgotten():
                state.arrange(state.residency.retire(event.segments))
            case e.InstanceAttached():
                _attached(state, event)
            case e.Detached():
                _detached(state, event.instance)
            case e.Marked():
                runtimes.marked(state, event)
            case e.SaidByRuntime():
                runtimes.said(state, event)
            case e.SeatUnwanted():
                runtimes.unwanted(state, event)
            case e.RuntimeGone():
                runtimes.gone(state, event)
            case e.Tick():
                turns.tick(state)
                reclaim.tick(state)
                for told in state.meter.statements(now_s):
                    state.emit(told)
            case _:
                assert_never(event)
        while state.look_again and state.relieving is not None:
            state.look_again = False
            seats.relieve(state, state.relieving)
        if state.left_seat:
            state.left_seat = False
            growth.room(state)
        if state.coming:
            preloads.give_up(state)
            turns.next_turns(state)
        runtimes.want(state)
        runtimes.lend(state)
        state.meter.sync(now_s)
        out, state.out = state.out, []
        return out

    def check(self) -> None:
        """Asserts the invariants between any two events."""
        state = self._state
        state.residency.check()
        computing = [lease for lease in state.leases.values() if lease.state in TURN]
        assert len(computing) <= state.turns
        assert state.runtimes.keys() == {lease.runtime for lease in state.leases.values() if lease.runtime}
        lent = [books.name for books in state.runtimes.values() if books.lent]
        assert len(lent) <= 1, "two steps in another's turn"
        for name in lent:
            states = {lease.state for lease in state.members(name) if not lease.vacated}
            assert states, "nobody has the step that was lent"
            assert states.isdisjoint(TURN), "one has a turn of its own and another's"
        for serial, lease in state.leases.items():
            assert lease.serial == serial
            assert lease.frames >= 0
            if lease.state is not LeaseState.CLOSING:
                assert state.instances[lease.instance].lease is lease
            assert lease.state is not LeaseState.AWAY or not state.residency.seated(lease.instance), "away on a seat"
            if lease.state in (*TURN, LeaseState.PAUSED, LeaseState.LEAVING, LeaseState.ENDING) and not lease.refused:
                assert state.residency.seated(lease.instance), "no seat"
            assert lease.state is not LeaseState.PAUSED or not lease.frames, "paused in the middle of a frame"
        if (held := state.preload) is not None:
            assert state.residency.seated(owner_of(held.instance)), "what is brought is not held"


def _attached(state: MachineState, event: e.InstanceAttached) -> None:
    state.gate.attach(event.instance)
    empty = m.Manifest(instance=event.instance, version=0, entries=[], segments=[])
    state.instances[event.instance] = AttachedInstance(
        event.tenant, empty, llm=event.llm, group=event.group, adapter=event.adapter
    )
    state.adopt(event.instance)


def _detached(state: MachineState, instance: str) -> None:
    preloads.about(state, instance)
    state.gate.detach(instance)
    state.manifests.pop(instance, None)  # first: none that is on its way can end the lease
    endings.end_of(state, instance, "revoked")
    wakes = [first.wake for first in state.coming if isinstance(first, e.WakeAsked)]
    for wake in wakes:
        if wake.instance == instance:
            turns.revoke(state, wake.lease.serial)
    state.instances.pop(instance, None)
    state.emit(o.Detach(instance))
    state.arrange(state.residency.retire(state.residency.unlearn(instance)))


def _unload(state: MachineState, asked: m.DropModel) -> None:
    """Segments on their way stay until their copies have ended: they are in a seat."""
    for name in asked.instances:
        preloads.about(state, name)
    state.drop(state.residency.alone(asked.instances))
    left_nbytes = max((state.residency.resident_nbytes(name) for name in asked.instances), default=0)
    resident = state.residency.changed()
    state.emit(m.Unloaded(query=asked.query, left_nbytes=left_nbytes, resident=resident, stats=state.stats()))


def _manifest(state: MachineState, manifest: m.Manifest) -> None:
    """A newer version, or the same one in a better order: adopted at once, or when the instance's lease ends."""
    name, residency = manifest.instance, state.residency
    known = state.manifests.get(name)
    if known is not None and known.version > manifest.version:
        return
    before_nbytes = residency.resident_nbytes(name)
    state.manifests[name] = manifest
    before = residency.learn(name, manifest.segments)
    instance = state.instances.get(name)
    lease = instance.lease if instance is not None else None
    if lease is None and residency.resident_nbytes(name) > before_nbytes:
        state.press()  # others have its segments here: the controller should know before it places its first request
    if lease is None:
        state.adopt(name)
    elif (writing := lease.writing) is not None and writing.committed and lease.state is LeaseState.ENDING:
        newer = manifest.version > state.instances[name].manifest.version  # and not only in a better order
        placed = {place.segment for place in writing.places or ()}
        if newer and placed <= {segment for segment, _ in manifest.segments}:
            endings.written_back(state, lease, writing)
    state.arrange(residency.retire(before))  # segments of a version that this instance was never bound to


def _dropped(state: MachineState, name: str) -> None:
    """The store no longer has a manifest of it."""
    preloads.about(state, name)
    state.manifests.pop(name, None)
    endings.end_of(state, name, "revoked")
    segments = state.residency.unlearn(name)
    if (instance := state.instances.get(name)) is not None and instance.lease is None:
        state.adopt(name)
    state.arrange(state.residency.retire(segments))
