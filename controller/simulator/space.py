"""Who has what of simulated GPUs' memory, who makes room, and what the core is to be told of it: pure.

A lease has a seat: its model stays, and its activations. One whose turn is another's keeps it, until those that compute
need the room and all idle models are gone: then the seats that have had no turn for longest are left, one by one, and
what they have goes as far as it is needed. Who has left copies that back from the host when its turn comes again. (What
a real one has made itself is copied too; that is little, and is not simulated.)
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter

from dormouse.controller.scheduler import Scheduler
from dormouse.controller.simulator.contents import Contents
from dormouse.controller.simulator.devices import SimulatedMemory
from dormouse.controller.simulator.leases import SimulatedLease
from dormouse.controller.simulator.turns import seat_of

_INSTANCE = attrgetter("instance")


class Space:
    """Of one node. ``whole``: models are evicted as a whole; ``reuse``: they stay when another one runs there;
    ``turned``: leases take turns. ``memory`` and ``leases`` (by serial) are by GPU.
    """

    def __init__(
        self,
        memory: Sequence[SimulatedMemory],
        contents: Contents,
        core: Scheduler,
        whole: bool,
        reuse: bool,
        turned: bool,
    ) -> None:
        self.memory = list(memory)
        self.leases: list[dict[int, SimulatedLease]] = [{} for _ in memory]
        self.core = core
        self._contents, self._segments = contents, contents.segments
        self._whole, self._reuse, self._turned = whole, reuse, turned
        self._changed: list[dict[str, None]] = [{} for _ in memory]  # segments of which the core is not told yet

    def look(self, gpu: int, lease: SimulatedLease) -> None:
        """What it needs."""
        name, memory = lease.wake.instance, self.memory[gpu]
        resident, segments = memory.resident, self._segments[name]
        if len(segments) == 1:  # most have no more: this is where a simulation spends its time
            segment, nbytes = segments[0]
            there = resident.get(segment, 0)
            missing = nbytes - there
            lease.parts = ((segment, there, nbytes),) if missing else ()
        else:
            lease.parts = self._contents.missing(name, resident)
            missing = sum(nbytes - there for _, there, nbytes in lease.parts)
        if missing and not self._reuse:
            self._evict(gpu, lease, memory.capacity_nbytes, True)
        lease.need = missing + lease.spec.activation_nbytes

    def comes(self, gpu: int, lease: SimulatedLease) -> bool:
        """Whether something that it shares comes for another."""
        arriving = self.memory[gpu].arriving
        return bool(arriving) and any(name in arriving for name, _ in self._segments[lease.wake.instance])

    def make(self, gpu: int, lease: SimulatedLease) -> bool:
        """Room for it; False if there is not enough, because others compute here, or read what is in the way."""
        memory, most_nbytes = self.memory[gpu], self.memory[gpu].capacity_nbytes - lease.need
        self._evict(gpu, lease, lease.need, self._whole)
        while memory.used_nbytes > most_nbytes and self._one_leaves(gpu):
            self._evict(gpu, lease, lease.need, self._whole)
        if memory.used_nbytes <= most_nbytes:
            return True
        assert memory.pins or len(self.leases[gpu]) > 1, "a wake did not fit"
        return False

    def arrived(self, gpu: int, lease: SimulatedLease) -> None:
        """All of its model is there, where leases take turns."""
        arriving, changed = self.memory[gpu].arriving, self._changed[gpu]
        for segment, _, _ in lease.parts:
            arriving.pop(segment, None)
            changed[segment] = None

    def lost(self, gpu: int) -> dict[int, SimulatedLease]:
        """All that it has, with these leases."""
        leases, self.leases[gpu] = self.leases[gpu], {}
        self.memory[gpu] = SimulatedMemory(self.memory[gpu].capacity_nbytes)
        self._changed[gpu].clear()
        return leases

    def _evict(self, gpu: int, lease: SimulatedLease, nbytes: int, whole: bool) -> None:
        """What no seat holds, until so much is free."""
        gone = self.memory[gpu].make_room(nbytes, self._victims(gpu, lease), whole)
        if self._turned:
            self._changed[gpu] |= dict.fromkeys(segment for segment, _ in gone)
        else:
            lease.changed = [*lease.changed, *gone] if lease.changed else gone

    def _victims(self, gpu: int, lease: SimulatedLease) -> Iterable[str]:
        """Segments, least worth first; last what seats had that were left."""
        name, contents = lease.wake.instance, self._contents
        if not self._turned:
            if not contents.shared:
                return map(_INSTANCE, self.core.victims(gpu))
            return contents.ranked(self.memory[gpu].resident, self.core.worth(gpu), name)
        seated: set[str] = set()
        left: list[str] = []
        for other in self.leases[gpu].values():
            if other is not lease:
                mine = [segment for segment, _ in self._segments[other.wake.instance]]
                seated.update(mine) if seat_of(other).here else left.extend(mine)
        if not contents.shared:
            return chain(map(_INSTANCE, self.core.victims(gpu)), left)
        ranked = contents.ranked(self.memory[gpu].resident, self.core.worth(gpu), name)
        return [segment for segment in ranked if segment not in seated]

    def _one_leaves(self, gpu: int) -> bool:
        """Who has had no turn for longest has no seat either; False if there is nobody."""
        paused: list[tuple[float, int]] = []
        for serial, lease in self.leases[gpu].items():
            if (seat := lease.seat) is not None and seat.here and seat.paused_s is not None:
                paused.append((seat.paused_s, serial))
        if not paused:
            return False
        lease = self.leases[gpu][min(paused)[1]]
        seat_of(lease).here = False
        self.memory[gpu].hold(-lease.spec.activation_nbytes)
        return True

    def news(self, gpu: int, lease: SimulatedLease) -> list[tuple[str, int]]:
        """What instances have here now of which the core is not told yet: with a base, of all who share it. This lease
        is over; where leases take turns, others may have changed it.
        """
        memory, contents = self.memory[gpu], self._contents
        if self._turned:
            changed, self._changed[gpu] = self._changed[gpu], {}
            there = memory.resident | memory.arriving
            if contents.shared:
                return contents.of_users(changed, there)
            return [(segment, there.get(segment, 0)) for segment in changed]
        if not contents.shared:
            return [*lease.changed, *((segment, nbytes) for segment, _, nbytes in lease.parts)]
        segments = [*(segment for segment, _ in lease.changed), *(segment for segment, _, _ in lease.parts)]
        return contents.of_users(segments, memory.resident)
