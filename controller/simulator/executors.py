"""Stands for the executors in the simulator: leases, from the grant to the end, with the room they make and the copies
they wait for. Pure. Knows neither functions nor the reason of a request; reports events to the core. A lease that finds
no room (gpu.py) waits for it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random

from dormouse.controller.simulator.agenda import BEGIN, COPIED, ENDED, PRELOADED, PRESSED, Agenda
from dormouse.controller.simulator.baselines import SimulatedPolicy
from dormouse.controller.simulator.devices import ModelSpec, Wires
from dormouse.controller.simulator.gpu import MOVE_BPS, SimulatedGpu
from dormouse.controller.simulator.leases import SimulatedLease, Tally
from dormouse.controller.simulator.links import Links, SimulatedCopy, SimulatedLink
from dormouse.controller.simulator.preloads import Preloads, SimulatedPreload
from dormouse.controller.simulator.streams.runtime import SimulatedRuntime
from dormouse.controller.simulator.streams.runtimes import RuntimeLeases
from dormouse.controller.simulator.turns import Turns
from dormouse.core.decisions.memory.quotas import MemoryQuotas, held, missing
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.messages import Done
from dormouse.schemas.policy import Policy


class Executors:
    """Those of one node. ``specs`` are by instance; ``tell`` takes an event to ``core`` and performs its actions.
    ``turns`` is there if leases take turns. ``quotas``: bytes of each GPU that tenants may keep before all others.
    """

    def __init__(
        self,
        policy: Policy,
        topology: Topology,
        gpus: Sequence[SimulatedGpu],
        specs: Mapping[str, ModelSpec],
        agenda: Agenda,
        core: Scheduler,
        tell: Callable[[ev.Event], None],
        seed: int,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        baseline = policy if isinstance(policy, SimulatedPolicy) else SimulatedPolicy()
        self.gpus = gpus
        self.tally = Tally(len(gpus))
        turned = policy.turns > 1 or any(spec.host_s or spec.llm is not None for spec in specs.values())
        self.turns: Turns | None = None
        if turned:
            self.turns = Turns(len(gpus), policy.turns, policy.turn_ms / 1000, agenda, self.tally, tell, self.ended)
            self.runtimes = RuntimeLeases(self, gpus, self.turns.processors, self.turns.work, agenda, tell)
            self.runtimes.memory.offload, self.runtimes.margins = policy.offload, policy.turn_order == "margin"
        self._specs = specs
        self._quotas = MemoryQuotas(quotas or {}, lambda name: specs[name].tenant if name in specs else "")
        self._agenda, self.core, self._tell = agenda, core, tell
        self.links = Links(lambda at_s, copy, version: agenda.put(at_s, COPIED, copy, version))
        self.wires = Wires(topology, range(len(gpus)))
        self._topology = topology
        self.preloads = Preloads(gpus, topology, self.wires, self.links, self.preload_worth, agenda, specs)
        self.preloads.held, self.preloads.freed = baseline.preload_holds, self._freed
        self._release = baseline.release
        self._runs = Random(seed)
        self._reuse = baseline.reuse
        self._allocate = baseline.allocate
        self._copies = not baseline.native  # else the start of a process contains them
        self.granted: Callable[[SimulatedLease], None] = lambda lease: None  # receives each of a language model

    def worth(self, gpu: int, of: str = "", coming: str = "") -> dict[str, float]:
        """The core's; what tenants have beyond their quotas, with what is ``coming``, goes first. ``of``: also of that
        one.
        """
        return self._within_quotas(gpu, self.core.worth(gpu, of), coming or of)

    def preload_worth(self, gpu: int, coming: str) -> dict[str, float]:
        """The same for what comes there before anybody asks."""
        return self._within_quotas(gpu, self.core.preload_worth(gpu, coming), coming)

    def _within_quotas(self, gpu: int, worth: dict[str, float], coming: str) -> dict[str, float]:
        if not self._quotas:
            return worth
        residency = self.gpus[gpu].residency
        models, claimed = held(residency)
        if self._quotas.limits(coming):
            models.update(missing(residency, coming))
        kv: Counter[str] = Counter()
        for name, nbytes in claimed.items():
            kv[self._specs[name].tenant] += nbytes
        return dict(self._quotas.adjusted(worth, models, kv, coming))

    @property
    def host_bps(self) -> float:
        return self._topology.host_bps

    def up(self, number: int) -> None:
        gpu = self.gpus[number]
        self._tell(ev.ExecutorUp(number, gpu.epoch, gpu.stats))

    def forget(self, instance: str) -> None:
        """Its memory is given back, wherever it has some; nobody shares it."""
        for gpu in self.gpus:
            gpu.residency.forget(gpu.residency.models.by_instance[instance].nbytes)
            if resident := gpu.residency.changed():
                self._tell(ev.Evicted(gpu.number, gpu.epoch, tuple(resident), gpu.stats))

    def end_runtime(self, instance: str) -> None:
        """Its process ends with it."""
        for gpu in self.gpus:
            if gpu.contexts.pop(instance, None) is not None:
                gpu.told = tuple(gpu.contexts)
                self._tell(ev.RuntimesOn(gpu.number, gpu.epoch, gpu.told))

    # --- a lease

    def wake(self, wake: ev.WakeOn) -> None:
        gpu, spec = self.gpus[wake.lease.gpu], self._specs[wake.instance]
        self.preloads.stop(gpu.number)
        lease = gpu.leases[wake.lease.serial] = SimulatedLease(wake, spec, self._agenda.now_s)
        if spec.llm is not None:
            lease.runtime = SimulatedRuntime(spec.llm, self.runtimes)
            self.granted(lease)
        if self.turns is not None and self._full(gpu):
            self.turns.coming[gpu.number].append(lease)
        else:
            self._take(gpu, lease)

    def _take(self, gpu: SimulatedGpu, lease: SimulatedLease) -> None:
        """It has a turn, for the first time or again."""
        if lease.seat is not None:
            assert self.turns is not None
            self.turns.resume(lease)
            if lease.seat.here:
                self.turns.compute(lease)
                return
        elif self.turns is not None:
            self.turns.begin(lease, self._run_s(lease))
        self._queue(gpu, lease)

    def leave(self, lease: SimulatedLease) -> None:
        """It has no turn any more; the next that waits for it may begin."""
        assert self.turns is not None
        self.turns.leave(lease)
        self.next_turns(lease.wake.lease.gpu)

    def next_turns(self, number: int) -> None:
        """Leases that wait for a turn there may begin."""
        assert self.turns is not None
        gpu, coming = self.gpus[number], self.turns.coming[number]
        while coming and not self._full(gpu):
            self._take(gpu, coming.popleft())
        self._try_again(gpu)

    def _full(self, gpu: SimulatedGpu) -> bool:
        """Nobody gets a turn now."""
        return gpu.lent or (self.turns is not None and self.turns.full(gpu.number))

    def passed(self, lease: SimulatedLease, other: SimulatedLease) -> None:
        """The turn of the one is the other's."""
        assert self.turns is not None
        self.turns.passed(lease, other)

    def _queue(self, gpu: SimulatedGpu, lease: SimulatedLease) -> None:
        """Begin, but not before others that wait for room on this GPU, nor while what it shares comes for another."""
        held = self.preloads.holds(gpu.number)
        if held or gpu.blocked or (self.turns is not None and gpu.residency.coming(lease.wake.instance)):
            gpu.blocked.append(lease)
        else:
            self._begin(gpu, lease)

    def _try_again(self, gpu: SimulatedGpu) -> None:
        """There may be room for those that wait for it."""
        if gpu.blocked:
            blocked, gpu.blocked = gpu.blocked, []
            for lease in blocked:
                self._queue(gpu, lease)

    def _freed(self, gpu: SimulatedGpu) -> None:
        """The preload that held it is over."""
        self._try_again(gpu)
        for lease in list(gpu.leases.values()):
            if lease.runtime is not None and lease.seat is not None and lease.seat.here:
                self.runtimes.goes_on(lease)

    def _begin(self, gpu: SimulatedGpu, lease: SimulatedLease) -> None:
        """If there can be room."""
        if not self._reuse and gpu.residency.missing_nbytes(lease.wake.instance):
            gpu.residency.relieve()
        coming = lease.wake.instance
        plan = gpu.seat(lease, lambda number: self.worth(number, coming=coming), self._topology.host_bps)
        if plan is None:
            gpu.blocked.append(lease)
            return
        if lease.runtime is not None and (lease.runtime.cold or any(change.evicted for change in plan.plans)):
            self._agenda.put(self._agenda.now_s, PRESSED, lease)
        now, lease.missing = self._agenda.now_s, plan.missing
        if lease.runtime is None:
            gpu.ordinary_s = now
        lease.began_s = now
        for change in plan.plans:
            lease.moved_s += change.moved_nbytes / MOVE_BPS
            for move in change.moves:
                gpu.residency.arrived(move.segment)
        if lease.seat is not None:
            lease.seat.here = True
        if not lease.missing or not self._copies:
            self._arrived(gpu, lease)
            if self.turns is None:
                self._agenda.put(now + self._run_s(lease) + lease.moved_s, ENDED, lease)
            else:
                self.turns.compute(lease)
        elif self._allocate:
            self._agenda.put(now + lease.spec.allocate_s, BEGIN, lease)
        else:
            self.copy(lease)

    @staticmethod
    def _arrived(gpu: SimulatedGpu, lease: SimulatedLease) -> None:
        """All of its model is there."""
        for segment, _, _ in lease.missing:
            gpu.residency.arrived(segment)

    def _run_s(self, lease: SimulatedLease) -> float:
        spec, more = lease.spec, max(0, lease.wake.requests - 1)
        return (self._runs.choice(spec.runs_s) if spec.runs_s else spec.run_s) + more * spec.per_request_s

    # --- turns

    def pause(self, pause: ev.PauseOn) -> None:
        assert self.turns is not None
        gpu = self.gpus[pause.gpu]
        self.turns.pause(gpu.leases[pause.serial])
        self._try_again(gpu)

    def resume(self, turn: ev.TurnOn) -> None:
        assert self.turns is not None
        lease = self.gpus[turn.gpu].leases[turn.serial]
        self.preloads.stop(turn.gpu)
        gpu = self.gpus[turn.gpu]
        if self._full(gpu):
            self.turns.coming[turn.gpu].append(lease)
        else:
            self._take(gpu, lease)

    # --- copies

    def copy(self, lease: SimulatedLease) -> None:
        wake, spec = lease.wake, lease.spec
        gpu = wake.lease.gpu
        if self.turns is None:
            lease.runs_until_s = self._agenda.now_s + self._run_s(lease)
        missing, peer = sum([nbytes for _, _, nbytes in lease.missing]), 0
        back = lease.seat is not None and lease.seat.rested  # it had all of it before
        if wake.peers and not back and self._topology.peer(wake.peers[0], gpu) > self._topology.host_bps:
            source = self.gpus[wake.peers[0]].residency
            lease.pinned = [segment for segment, _ in source.pin(segment for segment, _, _ in lease.missing)]
            peer = sum(map(source.pool.nbytes, lease.pinned))
            lease.source = source
        lease.copied += missing
        lease.peer += peer
        lease.extra_s = (spec.extra_s * (missing - peer) + spec.peer_extra_s * peer) / spec.nbytes + lease.moved_s
        if peer:
            lease.from_peer = self._open(lease, peer, self.wires.peer(wake.peers[0], gpu))
        if missing > peer:
            self._open(lease, missing - peer, self.wires.host(gpu))
        if self.turns is not None:
            self.turns.compute(lease)

    def _open(self, lease: SimulatedLease, nbytes: float, links: tuple[SimulatedLink, ...]) -> SimulatedCopy:
        copy = SimulatedCopy(nbytes, links, lease)
        lease.open.append(copy)
        self.links.begin(copy, self._agenda.now_s)
        return copy

    def copied(self, copy: SimulatedCopy) -> None:
        if isinstance(copy.token, SimulatedPreload):
            self.preloads.copied(copy)
            return
        now = self._agenda.now_s
        self.links.end(copy, now)
        lease: SimulatedLease = copy.token
        lease.open.remove(copy)
        if copy is lease.from_peer:
            self._let_go(lease)
        if lease.open:
            return
        wake = lease.wake.lease
        gpu = self.gpus[wake.gpu]
        self._arrived(gpu, lease)
        self._tell(ev.Woken(wake.gpu, wake.epoch, wake.serial, int((now - lease.began_s) * 1e6)))
        if self.turns is None:
            self._agenda.put(max(now, lease.runs_until_s) + lease.extra_s, ENDED, lease)
        else:
            self.turns.copied(lease)
            self._try_again(gpu)

    def _let_go(self, lease: SimulatedLease) -> None:
        """Nothing is read from another GPU any more."""
        source = lease.source
        lease.from_peer = lease.source = None
        if source is None:
            return
        source.let_go(lease.pinned)
        for gpu in self.gpus:
            if gpu.residency is source:
                self._try_again(gpu)

    # --- ends

    def ended(self, lease: SimulatedLease) -> None:
        wake, now = lease.wake, self._agenda.now_s
        gpu = self.gpus[wake.lease.gpu]
        del gpu.leases[wake.lease.serial]
        if lease.runtime is None:
            gpu.ordinary_s = now
        if lease.seat is None or lease.seat.here:
            gpu.leave(lease)
        if self._release and lease.runtime is not None:
            gpu.release(wake.instance)
            gpu.told = tuple(gpu.contexts)
            self._agenda.put(now, PRELOADED, ev.RuntimesOn(gpu.number, gpu.epoch, gpu.told))
        if self.turns is None:
            self.tally.leased(lease, now, True)
        elif wake.request >= self.tally.warm:
            self.tally.copied(lease)
        done = Done(
            serial=wake.lease.serial,
            outcome="ended",
            gpu_us=int((now - lease.started_s if lease.runtime is None else lease.runtime.busy_s) * 1e6),
            copied_nbytes=lease.copied,
            peer_nbytes=lease.peer,
            file_nbytes=0,
            resident=gpu.residency.changed(),
            peak_activation_nbytes=lease.spec.activation_nbytes,
            version=1,
            stats=gpu.stats,
            peers=[wake.peers[0]] if lease.peer else [],
        )
        self._tell(ev.LeaseOver(gpu.number, wake.lease.epoch, done))
        self._try_again(gpu)

    # --- a GPU that is lost

    def lost(self, number: int) -> list[str]:
        """Its leases go with it, and who copies from it has the rest from the host, as an executor does that finds a
        source gone. Returns the instances that had something there; the core is to be notified.
        """
        now, gpu = self._agenda.now_s, self.gpus[number]
        residency = gpu.residency
        self.preloads.lost(number)
        if self.turns is not None:
            self.turns.coming[number].clear()
        for lease in gpu.lost().values():
            lease.lost = True
            for copy in lease.open:
                self.links.end(copy, now)
            if self.turns is None:
                self.tally.leased(lease, now, False)
            else:
                self.turns.lost(lease)
            self._let_go(lease)
        for reader in [lease for other in self.gpus for lease in other.leases.values()]:
            if reader.source is residency and (read := reader.from_peer) is not None:
                left = read.left - read.rate * (now - read.at_s)
                self.links.end(read, now)
                reader.open.remove(read)
                reader.from_peer = reader.source = None
                reader.peer -= max(0, int(left))
                self._open(reader, max(0.0, left), self.wires.host(reader.wake.lease.gpu))
        return residency.instances
