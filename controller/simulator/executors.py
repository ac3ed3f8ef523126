"""What the simulator puts in the place of executors: leases, from the grant to the end, with the room they make and the
copies they wait for. Pure. Knows neither functions nor why a request came; what happens it tells the core.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from random import Random

from dormouse.controller import events as ev
from dormouse.controller.scheduler import Scheduler
from dormouse.controller.simulator.agenda import BEGIN, COPIED, ENDED, Agenda
from dormouse.controller.simulator.baselines import SimulatedPolicy
from dormouse.controller.simulator.contents import Contents
from dormouse.controller.simulator.devices import Memory, ModelSpec, Wires
from dormouse.controller.simulator.leases import Lease, Tally
from dormouse.controller.simulator.links import Copy, Link, Links
from dormouse.controller.topology import Topology
from dormouse.schemas.messages import Done, PoolStats
from dormouse.schemas.policy import Policy

_INSTANCE = attrgetter("instance")


class Executors:
    """Those of one node. ``specs`` are by instance; ``tell`` takes an event to ``core`` and performs what it answers.
    ``epochs`` and ``memory`` are by GPU.
    """

    def __init__(
        self,
        policy: Policy,
        topology: Topology,
        memory: Sequence[Memory],
        specs: dict[str, ModelSpec],
        contents: Contents,
        agenda: Agenda,
        core: Scheduler,
        tell: Callable[[ev.Event], None],
        seed: int,
    ) -> None:
        baseline = policy if isinstance(policy, SimulatedPolicy) else SimulatedPolicy()
        gpus = len(memory)
        self.memory = list(memory)
        self.epochs = [1] * gpus
        self.tally = Tally(gpus)
        self._running: list[Lease | None] = [None] * gpus
        self._blocked: dict[int, Lease] = {}  # by GPU: what another GPU reads is in the way
        self._specs, self._contents, self._segments = specs, contents, contents.segments
        self._agenda, self.core, self._tell = agenda, core, tell
        self._links = Links(lambda at_s, copy, version: agenda.put(at_s, COPIED, copy, version))
        self._wires = Wires(topology, range(gpus))
        self._topology = topology
        self._runs = Random(seed)
        self._whole = policy.eviction in ("lru", "torpor")
        self._reuse = baseline.reuse
        self._allocate = baseline.allocate
        self._copies = not baseline.native  # else the start of a process contains them

    def up(self, gpu: int) -> None:
        self._tell(ev.ExecutorUp(gpu, self.epochs[gpu], stats(self.memory[gpu])))

    def back(self, gpu: int) -> None:
        """A lost one, empty."""
        self.epochs[gpu] += 1
        self.up(gpu)

    def forget(self, instance: str) -> None:
        """Its memory is given back, wherever it has some; nobody shares it."""
        for gpu, memory in enumerate(self.memory):
            if instance in memory.resident:
                memory.used_nbytes -= memory.resident.pop(instance)
                self._tell(ev.Evicted(gpu, self.epochs[gpu], ((instance, 0),), stats(memory)))

    # --- a lease

    def wake(self, wake: ev.WakeOn) -> None:
        gpu, name = wake.lease.gpu, wake.instance
        spec, memory = self._specs[name], self.memory[gpu]
        lease = self._running[gpu] = Lease(wake, spec, self._agenda.now_s)
        resident, segments = memory.resident, self._segments[name]
        if len(segments) == 1:  # most have no more: this is where a simulation spends its time
            segment, nbytes = segments[0]
            there = resident.get(segment, 0)
            missing = nbytes - there
            if missing:
                lease.parts = ((segment, there, nbytes),)
        else:
            lease.parts = self._contents.missing(name, resident)
            missing = sum(nbytes - there for _, there, nbytes in lease.parts)
        if missing and not self._reuse:
            lease.changed = memory.make_room(memory.capacity_nbytes, self._victims(gpu, name), True)
        lease.need = missing + spec.activation_nbytes
        self._try(gpu, lease)

    def _try(self, gpu: int, lease: Lease) -> None:
        """Begin, if there can be room: what another GPU reads is waited for."""
        memory = self.memory[gpu]
        if lease.need > memory.capacity_nbytes - memory.used_nbytes:
            gone = memory.make_room(lease.need, self._victims(gpu, lease.wake.instance), self._whole)
            lease.changed = [*lease.changed, *gone] if lease.changed else gone
            if lease.need > memory.free_nbytes:
                assert memory.pins, "a wake did not fit"
                self._blocked[gpu] = lease
                return
        spec, now = lease.spec, self._agenda.now_s
        lease.began_s = now
        if spec.activation_nbytes:
            memory.hold(spec.activation_nbytes)
        for segment, there, nbytes in lease.parts:
            memory.add(segment, nbytes - there)
            if self._contents.shared:
                memory.arriving[segment] = there
        if not lease.parts or not self._copies:
            memory.arriving.clear()
            self._agenda.put(now + self._run_s(spec), ENDED, lease)
        elif self._allocate:
            self._agenda.put(now + spec.allocate_s, BEGIN, lease)
        else:
            self.copy(lease)

    def _run_s(self, spec: ModelSpec) -> float:
        return self._runs.choice(spec.runs_s) if spec.runs_s else spec.run_s

    def _victims(self, gpu: int, instance: str) -> Iterable[str]:
        """Segments, least worth first."""
        if not self._contents.shared:
            return map(_INSTANCE, self.core.victims(gpu))
        return self._contents.ranked(self.memory[gpu].resident, self.core.worth(gpu), instance)

    def copy(self, lease: Lease) -> None:
        now, wake, spec = self._agenda.now_s, lease.wake, lease.spec
        gpu = wake.lease.gpu
        lease.runs_until_s = now + self._run_s(spec)
        source = None
        if wake.peers and self._topology.peer(wake.peers[0], gpu) > self._topology.host_bps:
            source = self.memory[wake.peers[0]]
        missing = peer = 0
        pinned: list[str] = []
        for segment, there, nbytes in lease.parts:
            missing += nbytes - there
            if source is not None and (more := min(nbytes, source.readable(segment)) - there) > 0:
                peer += more
                source.pin(segment)
                pinned.append(segment)
        lease.pinned = pinned
        lease.copied, lease.peer = missing, peer
        lease.extra_s = (spec.extra_s * (missing - peer) + spec.peer_extra_s * peer) / spec.nbytes
        if peer:
            lease.source = source
            lease.from_peer = self._begin(lease, peer, self._wires.peer(wake.peers[0], gpu))
        if missing > peer:
            self._begin(lease, missing - peer, self._wires.host(gpu))

    def _begin(self, lease: Lease, nbytes: float, links: tuple[Link, ...]) -> Copy:
        copy = Copy(nbytes, links, lease)
        lease.open.append(copy)
        self._links.begin(copy, self._agenda.now_s)
        return copy

    def copied(self, copy: Copy) -> None:
        now = self._agenda.now_s
        self._links.end(copy, now)
        lease: Lease = copy.token
        lease.open.remove(copy)
        if copy is lease.from_peer:
            self._let_go(lease)
        if lease.open:
            return
        wake = lease.wake.lease
        self.memory[wake.gpu].arriving.clear()
        self._tell(ev.Woken(wake.gpu, wake.epoch, wake.serial, int((now - lease.began_s) * 1e6)))
        self._agenda.put(max(now, lease.runs_until_s) + lease.extra_s, ENDED, lease)

    def _let_go(self, lease: Lease) -> None:
        """Nothing is read from another GPU any more."""
        source = lease.source
        lease.from_peer = lease.source = None
        if source is None:
            return
        for segment in lease.pinned:
            source.unpin(segment)
        for gpu, blocked in list(self._blocked.items()):
            if self.memory[gpu] is source:
                del self._blocked[gpu]
                self._try(gpu, blocked)

    def ended(self, lease: Lease) -> None:
        wake = lease.wake
        gpu, now = wake.lease.gpu, self._agenda.now_s
        memory = self.memory[gpu]
        self._running[gpu] = None
        if lease.spec.activation_nbytes:
            memory.hold(0)
        self.tally.leased(lease, now, True)
        done = Done(
            serial=wake.lease.serial,
            outcome="ended",
            gpu_us=int((now - lease.started_s) * 1e6),
            copied_nbytes=lease.copied,
            peer_nbytes=lease.peer,
            file_nbytes=0,
            resident=self._changed(lease, memory) if lease.parts or lease.changed else [],
            peak_activation_nbytes=lease.spec.activation_nbytes,
            version=1,
            stats=stats(memory),
            peers=[wake.peers[0]] if lease.peer else [],
        )
        self._tell(ev.LeaseOver(gpu, wake.lease.epoch, done))

    def _changed(self, lease: Lease, memory: Memory) -> list[tuple[str, int]]:
        """What instances have here now, of which a lease has changed something: with a base, of all who share it."""
        if not self._contents.shared:
            return [*lease.changed, *((segment, nbytes) for segment, _, nbytes in lease.parts)]
        segments = [*(segment for segment, _ in lease.changed), *(segment for segment, _, _ in lease.parts)]
        return self._contents.of_users(segments, memory.resident)

    # --- a GPU that is lost

    def lost(self, gpu: int) -> list[str]:
        """Its lease goes with it, and who copies from it has the rest from the host, as an executor does that finds a
        source gone. Returns the segments it had; the core is to be told.
        """
        now, memory, lease = self._agenda.now_s, self.memory[gpu], self._running[gpu]
        self.memory[gpu] = Memory(memory.capacity_nbytes)
        self._running[gpu] = None
        self._blocked.pop(gpu, None)
        if lease is not None:
            lease.lost = True
            for copy in lease.open:
                self._links.end(copy, now)
            self.tally.leased(lease, now, False)
            self._let_go(lease)
        for reader in self._running:
            if reader is not None and reader.source is memory and (read := reader.from_peer) is not None:
                left = read.left - read.rate * (now - read.at_s)
                self._links.end(read, now)
                reader.open.remove(read)
                reader.from_peer = reader.source = None
                reader.peer -= max(0, int(left))
                self._begin(reader, max(0.0, left), self._wires.host(reader.wake.lease.gpu))
        return list(memory.resident)


def stats(memory: Memory) -> PoolStats:
    free = memory.capacity_nbytes - memory.used_nbytes
    return PoolStats(free_nbytes=free, largest_nbytes=free)
