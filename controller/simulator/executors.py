"""What the simulator puts in the place of executors: leases, from the grant to the end, with the room they make and the
copies they wait for. Pure. Knows neither functions nor why a request came; what happens it tells the core. Who
finds no room (space.py) waits for it.
"""

from collections.abc import Callable, Sequence
from random import Random

from dormouse.controller import events as ev
from dormouse.controller.keeping import EVICTION_CLASSES
from dormouse.controller.scheduler import Scheduler
from dormouse.controller.simulator.agenda import BEGIN, COPIED, ENDED, Agenda
from dormouse.controller.simulator.baselines import SimulatedPolicy
from dormouse.controller.simulator.contents import Contents
from dormouse.controller.simulator.devices import ModelSpec, SimulatedMemory, Wires
from dormouse.controller.simulator.leases import SimulatedLease, Tally
from dormouse.controller.simulator.links import Links, SimulatedCopy, SimulatedLink
from dormouse.controller.simulator.space import Space
from dormouse.controller.simulator.turns import Turns, seat_of
from dormouse.controller.topology import Topology
from dormouse.schemas.messages import Done, PoolStats
from dormouse.schemas.policy import Policy


class Executors:
    """Those of one node. ``specs`` are by instance; ``tell`` takes an event to ``core`` and performs what it answers.
    ``epochs`` and ``memory`` are by GPU. ``turns`` is there if leases take turns.
    """

    def __init__(
        self,
        policy: Policy,
        topology: Topology,
        memory: Sequence[SimulatedMemory],
        specs: dict[str, ModelSpec],
        contents: Contents,
        agenda: Agenda,
        core: Scheduler,
        tell: Callable[[ev.Event], None],
        seed: int,
    ) -> None:
        baseline = policy if isinstance(policy, SimulatedPolicy) else SimulatedPolicy()
        gpus = len(memory)
        self.epochs = [1] * gpus
        self.tally = Tally(gpus)
        turned = policy.turns > 1 or any(spec.host_s for spec in specs.values())
        self.turns = Turns(gpus, policy.turn_ms / 1000, agenda, self.tally, tell, self.ended) if turned else None
        whole = EVICTION_CLASSES[policy.eviction].whole
        self.space = Space(memory, contents, core, whole, baseline.reuse, turned)
        self.memory, self._leases = self.space.memory, self.space.leases
        self._blocked: dict[
            int, list[SimulatedLease]
        ] = {}  # by GPU: what another GPU reads is in the way, or others have
        self._specs, self._contents = specs, contents
        self._agenda, self.core, self._tell = agenda, core, tell
        self._links = Links(lambda at_s, copy, version: agenda.put(at_s, COPIED, copy, version))
        self._wires = Wires(topology, range(gpus))
        self._topology = topology
        self._runs = Random(seed)
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
        spec = self._specs[name]
        lease = self._leases[gpu][wake.lease.serial] = SimulatedLease(wake, spec, self._agenda.now_s)
        if self.turns is None:
            self.space.look(gpu, lease)
            self._try(gpu, lease)
        else:
            self.turns.begin(lease, self._run_s(spec))
            self._queue(gpu, lease)

    def _try(self, gpu: int, lease: SimulatedLease) -> None:
        """Begin, if there can be room: what another GPU reads is waited for."""
        memory = self.memory[gpu]
        if lease.need > memory.capacity_nbytes - memory.used_nbytes and not self.space.make(gpu, lease):
            self._blocked.setdefault(gpu, []).append(lease)
            return
        spec, now = lease.spec, self._agenda.now_s
        lease.began_s = now
        if spec.activation_nbytes:
            memory.hold(spec.activation_nbytes)
        for segment, there, nbytes in lease.parts:
            memory.add(segment, nbytes - there)
            if self._contents.shared:
                memory.arriving[segment] = there
        if lease.seat is not None:
            lease.seat.here = True
        if not lease.parts or not self._copies:
            if self.turns is None:
                memory.arriving.clear()
                self._agenda.put(now + self._run_s(spec), ENDED, lease)
            else:
                self.space.arrived(gpu, lease)
                self.turns.compute(lease)
        elif self._allocate:
            self._agenda.put(now + spec.allocate_s, BEGIN, lease)
        else:
            self.copy(lease)

    def _run_s(self, spec: ModelSpec) -> float:
        return self._runs.choice(spec.runs_s) if spec.runs_s else spec.run_s

    def _queue(self, gpu: int, lease: SimulatedLease) -> None:
        """Begin, but not before others that wait for room on this GPU."""
        blocked = self._blocked.get(gpu)
        if blocked:
            blocked.append(lease)
            return
        if self.space.comes(gpu, lease):
            self._blocked[gpu] = [lease]
            return
        self.space.look(gpu, lease)
        self._try(gpu, lease)

    def _try_again(self, gpu: int) -> None:
        """There may be room for those that wait for it."""
        for lease in self._blocked.pop(gpu, ()):
            if self.turns is None:
                self._try(gpu, lease)
            else:
                self._queue(gpu, lease)

    # --- turns

    def pause(self, pause: ev.PauseOn) -> None:
        assert self.turns is not None
        self.turns.pause(self._leases[pause.gpu][pause.serial])
        self._try_again(pause.gpu)

    def resume(self, turn: ev.TurnOn) -> None:
        assert self.turns is not None
        lease = self._leases[turn.gpu][turn.serial]
        self.turns.resume(lease)
        if seat_of(lease).here:
            self.turns.compute(lease)
        else:
            self._queue(turn.gpu, lease)

    # --- copies

    def copy(self, lease: SimulatedLease) -> None:
        now, wake, spec = self._agenda.now_s, lease.wake, lease.spec
        gpu = wake.lease.gpu
        if self.turns is None:
            lease.runs_until_s = now + self._run_s(spec)
        else:
            self.turns.compute(lease)
        source = None
        back = lease.seat is not None and lease.seat.rested  # it had all of it before
        if wake.peers and not back and self._topology.peer(wake.peers[0], gpu) > self._topology.host_bps:
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
        lease.copied += missing
        lease.peer += peer
        lease.extra_s = (spec.extra_s * (missing - peer) + spec.peer_extra_s * peer) / spec.nbytes
        if peer:
            lease.source = source
            lease.from_peer = self._begin(lease, peer, self._wires.peer(wake.peers[0], gpu))
        if missing > peer:
            self._begin(lease, missing - peer, self._wires.host(gpu))

    def _begin(self, lease: SimulatedLease, nbytes: float, links: tuple[SimulatedLink, ...]) -> SimulatedCopy:
        copy = SimulatedCopy(nbytes, links, lease)
        lease.open.append(copy)
        self._links.begin(copy, self._agenda.now_s)
        return copy

    def copied(self, copy: SimulatedCopy) -> None:
        now = self._agenda.now_s
        self._links.end(copy, now)
        lease: SimulatedLease = copy.token
        lease.open.remove(copy)
        if copy is lease.from_peer:
            self._let_go(lease)
        if lease.open:
            return
        wake = lease.wake.lease
        if self.turns is None:
            self.memory[wake.gpu].arriving.clear()
        else:
            self.space.arrived(wake.gpu, lease)
        self._tell(ev.Woken(wake.gpu, wake.epoch, wake.serial, int((now - lease.began_s) * 1e6)))
        if self.turns is None:
            self._agenda.put(max(now, lease.runs_until_s) + lease.extra_s, ENDED, lease)
        else:
            self.turns.copied(lease)
            self._try_again(wake.gpu)

    def _let_go(self, lease: SimulatedLease) -> None:
        """Nothing is read from another GPU any more."""
        source = lease.source
        lease.from_peer = lease.source = None
        if source is None:
            return
        for segment in lease.pinned:
            source.unpin(segment)
        for gpu in list(self._blocked):
            if self.memory[gpu] is source:
                self._try_again(gpu)

    # --- ends

    def ended(self, lease: SimulatedLease) -> None:
        wake = lease.wake
        gpu, now = wake.lease.gpu, self._agenda.now_s
        memory = self.memory[gpu]
        del self._leases[gpu][wake.lease.serial]
        if lease.spec.activation_nbytes:
            memory.hold(-lease.spec.activation_nbytes)
        if self.turns is None:
            self.tally.leased(lease, now, True)
        elif wake.request >= self.tally.warm:
            self.tally.copied(lease)
        done = Done(
            serial=wake.lease.serial,
            outcome="ended",
            gpu_us=int((now - lease.started_s) * 1e6),
            copied_nbytes=lease.copied,
            peer_nbytes=lease.peer,
            file_nbytes=0,
            resident=self.space.news(gpu, lease) if lease.parts or lease.changed or self.turns is not None else [],
            peak_activation_nbytes=lease.spec.activation_nbytes,
            version=1,
            stats=stats(memory),
            peers=[wake.peers[0]] if lease.peer else [],
        )
        self._tell(ev.LeaseOver(gpu, wake.lease.epoch, done))
        if self._blocked:
            self._try_again(gpu)

    # --- a GPU that is lost

    def lost(self, gpu: int) -> list[str]:
        """Its leases go with it, and who copies from it has the rest from the host, as an executor does that finds a
        source gone. Returns the segments it had; the core is to be told.
        """
        now, memory = self._agenda.now_s, self.memory[gpu]
        leases = self.space.lost(gpu)
        self._blocked.pop(gpu, None)
        for lease in leases.values():
            lease.lost = True
            for copy in lease.open:
                self._links.end(copy, now)
            if self.turns is None:
                self.tally.leased(lease, now, False)
            else:
                self.turns.lost(lease)
            self._let_go(lease)
        for reader in [lease for leases in self._leases for lease in leases.values()]:
            if reader.source is memory and (read := reader.from_peer) is not None:
                left = read.left - read.rate * (now - read.at_s)
                self._links.end(read, now)
                reader.open.remove(read)
                reader.from_peer = reader.source = None
                reader.peer -= max(0, int(left))
                self._begin(reader, max(0.0, left), self._wires.host(reader.wake.lease.gpu))
        return list(memory.resident)


def stats(memory: SimulatedMemory) -> PoolStats:
    free = memory.capacity_nbytes - memory.used_nbytes
    return PoolStats(free_nbytes=free, largest_nbytes=free)
