"""Turns of simulated leases: the leases that compute on each GPU, and those that spend time on the host: pure. Used
only where a model has time on the host, or a GPU more than one turn; else a lease computes from start to end, alone.

Leases that compute side by side share the GPU's time: each of n has an nth of it at each moment. So nothing is gained
by that, but that short requests pass long ones, and that one computes while another copies; real kernels that leave
part of a GPU unused gain more, those that fill it lose some. A request needs all of its model for its first half: its
time on the host begins when that is over and all copies have arrived. It loses its turn when the core says so, and its
seat when others need the room (gpu.py).
"""

from collections import deque
from collections.abc import Callable

from dormouse.controller.simulator.agenda import COMPUTED, IDLE, RESTED, THROUGH, Agenda
from dormouse.controller.simulator.leases import SimulatedLease, SimulatedSeat, Tally, seat_of
from dormouse.controller.simulator.links import Links, SimulatedCopy, SimulatedLink
from dormouse.core.decisions.scheduling import events as ev


class Turns:
    """Of one node. A GPU has so many ``turns``. ``turn_s``: after so long on the host the core is notified. ``over`` is
    called with a lease that has done all that it had to.
    """

    def __init__(
        self,
        gpus: int,
        turns: int,
        turn_s: float,
        agenda: Agenda,
        tally: Tally,
        tell: Callable[[ev.Event], None],
        over: Callable[[SimulatedLease], None],
    ) -> None:
        self._turns, self._turn_s = turns, turn_s
        # those that wait until a turn is given back
        self.coming: list[deque[SimulatedLease]] = [deque() for _ in range(gpus)]
        self._agenda, self._tally, self._tell, self._over = agenda, tally, tell, over
        # each carries a second of GPU time per second
        self.processors = [SimulatedLink(1.0) for _ in range(gpus)]
        self.work = Links(lambda at_s, copy, version: agenda.put(at_s, COMPUTED, copy, version))
        self._holders: list[list[SimulatedLease]] = [[] for _ in range(gpus)]  # of turns
        self._since_s = [0.0] * gpus  # when the first of them got its

    def full(self, gpu: int) -> bool:
        """All turns are taken: one of them will be given back at the end of a step."""
        return len(self._holders[gpu]) >= self._turns

    def begin(self, lease: SimulatedLease, run_s: float) -> None:
        """It has a turn."""
        lease.seat = SimulatedSeat(run_s / 2 if lease.spec.host_s else run_s)
        self.take(lease)

    def compute(self, lease: SimulatedLease) -> None:
        """Its model is here, or on its way."""
        if lease.runtime is not None:
            lease.runtime.leases.compute(lease)
            return
        seat = seat_of(lease)
        seat.computing = SimulatedCopy(seat.half_s, (self.processors[lease.wake.lease.gpu],), lease)
        self.work.begin(seat.computing, self._agenda.now_s)

    def copied(self, lease: SimulatedLease) -> None:
        """Nothing is on its way any more."""
        if lease.runtime is not None:
            lease.runtime.leases.copied(lease)
        elif seat_of(lease).computing is None:
            self._agenda.put(self._agenda.now_s + lease.extra_s, THROUGH, lease)

    def due(self, kind: int, what: SimulatedLease | SimulatedCopy, version: int) -> None:
        if isinstance(what, SimulatedCopy):
            if version == what.version:
                self._computed(what)
        elif what.lost:
            return
        elif kind == THROUGH:
            self._through(what)
        elif kind == IDLE:
            seat_of(what).idle = True
            self._say(ev.TurnIdle, what)
        elif kind == RESTED:
            self._rested(what)

    def _computed(self, work: SimulatedCopy) -> None:
        lease: SimulatedLease = work.token
        self.work.end(work, self._agenda.now_s)
        seat_of(lease).computing = None
        if lease.runtime is not None:
            lease.runtime.leases.computed(lease)
        elif not lease.open:
            self._agenda.put(self._agenda.now_s + lease.extra_s, THROUGH, lease)

    def _through(self, lease: SimulatedLease) -> None:
        """With its GPU time, and its copies: of one half, or of all."""
        seat, host_s = seat_of(lease), lease.spec.host_s
        lease.extra_s = 0.0
        if seat.rested or not host_s:
            self.leave(lease)
            self._over(lease)
            return
        seat.rested = True
        if host_s > self._turn_s:
            self._agenda.put(self._agenda.now_s + self._turn_s, IDLE, lease)
        self._agenda.put(self._agenda.now_s + host_s, RESTED, lease)

    def _rested(self, lease: SimulatedLease) -> None:
        """It has commands again."""
        seat = seat_of(lease)
        if seat.paused_s is not None:
            self._say(ev.TurnWanted, lease)
            return
        self.compute(lease)
        if seat.idle:
            seat.idle = False
            self._say(ev.TurnBusy, lease)

    def pause(self, lease: SimulatedLease) -> None:
        """Its turn is another's."""
        if lease.runtime is not None:
            lease.runtime.leases.pause(lease)
            return
        seat = seat_of(lease)
        assert seat.idle, "who computes is not paused"
        seat.idle, seat.paused_s = False, self._agenda.now_s
        self.leave(lease)

    def resume(self, lease: SimulatedLease) -> None:
        if lease.runtime is not None:
            lease.runtime.wants = lease.runtime.idles = False
        seat_of(lease).paused_s = None
        self.take(lease)

    def lost(self, lease: SimulatedLease) -> None:
        """With its GPU."""
        if (seat := lease.seat) is None:
            return  # it waits for its first turn
        if lease.runtime is not None:
            lease.runtime.leases.lost(lease)
        elif seat.computing is not None:
            self.work.end(seat.computing, self._agenda.now_s)
        if seat.paused_s is None:
            self.leave(lease)

    def take(self, lease: SimulatedLease) -> None:
        gpu = lease.wake.lease.gpu
        if not self._holders[gpu]:
            self._since_s[gpu] = self._agenda.now_s
        self._holders[gpu].append(lease)

    def leave(self, lease: SimulatedLease) -> None:
        """A GPU is busy while somebody has a turn there."""
        gpu = lease.wake.lease.gpu
        self._holders[gpu].remove(lease)
        if not self._holders[gpu] and lease.wake.request >= self._tally.warm:
            self._tally.busy(gpu, self._since_s[gpu], self._agenda.now_s)

    def passed(self, lease: SimulatedLease, other: SimulatedLease) -> None:
        """The turn of the one is the other's; the GPU was busy all the time."""
        holders = self._holders[lease.wake.lease.gpu]
        holders[holders.index(lease)] = other

    def _say(self, kind: type[ev.TurnIdle | ev.TurnBusy | ev.TurnWanted], lease: SimulatedLease) -> None:
        wake = lease.wake.lease
        self._tell(kind(wake.gpu, wake.epoch, wake.serial))
