"""Runs the scheduling core against simulated devices: the same `Scheduler`, another clock. Deterministic."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from operator import attrgetter
from random import Random
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dormouse.controller import events as ev
from dormouse.controller.scheduler import Scheduler
from dormouse.controller.simulator.baselines import Processes, SimulatedPolicy
from dormouse.controller.simulator.devices import Fault, Memory, ModelSpec, Outside, Wires
from dormouse.controller.simulator.instances import Instances
from dormouse.controller.simulator.links import Copy, Link, Links
from dormouse.controller.topology import Topology
from dormouse.schemas.messages import Done, PoolStats
from dormouse.schemas.policy import Policy

COPIED, ENDED, TICK, BEGIN, LOST, BACK, STARTED, LEAVES, ASKS = range(9)

INFINITY = float("inf")

WARM_DEADLINE_S: Final = 60.0
"""Of requests that are not counted: none of them is late, or the core would think that functions do not comply."""

REPORT_EVERY: Final = 8192
"""Arrivals between two calls of ``progress``."""


_INSTANCE = attrgetter("instance")


class _Lease:
    """``parts`` are what was missing: segments, what of each was there and what it has; ``copied`` bytes of them are
    copied, ``peer`` from the GPU whose ``source`` memory has ``pinned`` segments for it. ``open`` are copies that have
    not arrived, ``from_peer`` the one from there; ``changed`` is what is left of segments that made room.
    """

    __slots__ = (
        "began_s",
        "changed",
        "copied",
        "extra_s",
        "from_peer",
        "lost",
        "need",
        "open",
        "parts",
        "peer",
        "pinned",
        "runs_until_s",
        "source",
        "spec",
        "started_s",
        "wake",
    )

    def __init__(self, wake: ev.WakeOn, spec: ModelSpec, started_s: float) -> None:
        self.wake = wake
        self.spec = spec
        self.started_s = started_s
        self.began_s = started_s  # its memory was there
        self.runs_until_s = 0.0
        self.need = 0
        self.parts: Sequence[tuple[str, int, int]] = ()
        self.copied = 0
        self.peer = 0
        self.extra_s = 0.0
        self.open: list[Copy] = []
        self.from_peer: Copy | None = None
        self.source: Memory | None = None
        self.pinned: Sequence[str] = ()
        self.changed: Sequence[tuple[str, int]] = ()
        self.lost = False


class Simulation:
    """One run. ``models[f]`` is function f's, ``deadlines_s[f]`` its deadline, ``percentile`` (in (0, 1)) that of all
    functions or one for each. ``busy_s``, ``wakes`` and ``host_nbytes`` count leases of all but the warm requests;
    of those that a GPU has lost only ``busy_s``.
    """

    def __init__(
        self,
        policy: Policy,
        topology: Topology,
        gpus: int,
        gpu_nbytes: int,
        models: Sequence[ModelSpec],
        deadlines_s: Sequence[float],
        percentile: float | Sequence[float],
        seed: int = 0,
        faults: Sequence[Fault] = (),
        outside: Outside | None = None,
    ) -> None:
        baseline = policy if isinstance(policy, SimulatedPolicy) else SimulatedPolicy()
        assert outside is None or not (faults or baseline.native), "these do not know a router's queue"
        self.core = Scheduler(seed=seed, revoke_s=1.0, max_waiting=1 << 30, policy=policy, topology=topology)
        self._heap: list[tuple[float, int, int, Any, int]] = []
        self._number = 0
        self._links = Links(self._due)
        self._wires = Wires(topology, range(gpus))
        self._topology = topology
        self._memory = [Memory(gpu_nbytes) for _ in range(gpus)]
        self._epochs = [1] * gpus
        self._running: list[_Lease | None] = [None] * gpus
        self._blocked: dict[int, _Lease] = {}  # by GPU: what another GPU reads is in the way
        self._names = [f"f{i}" for i in range(len(models))]
        self._specs = dict(zip(self._names, models, strict=True))
        self._segments = {name: spec.segments(name) for name, spec in self._specs.items()}
        self._groups: dict[str, list[str]] = {}  # instances by the segment that they share
        self._instances = Instances()
        for name, spec in list(self._specs.items()):
            family = self._instances.of(name, spec.instances)
            for each in family:
                self._specs[each], self._segments[each] = spec, self._segments[name]
            for segment, _ in self._segments[name]:
                if segment != name or len(family) > 1:
                    self._groups.setdefault(segment, []).extend(family)
        self._outside = outside
        self._lines: list[deque[int]] = [deque() for _ in models]  # requests of each function in the router
        self._runs = Random(seed)
        self._deadlines_s = list(deadlines_s)
        self._whole = policy.eviction in ("lru", "torpor")
        self._reuse = baseline.reuse
        self._allocate = baseline.allocate
        self._processes = Processes(len(models), baseline.keep_alive) if baseline.native else None
        self._lost: list[int] = []  # requests that a GPU was lost with just now
        self._again: set[int] = set()  # those that were asked once more
        self._warm = 0
        self._tick_s = INFINITY  # when the next Tick comes
        self.on_busy: Callable[[int, float, float], None] | None = None  # told GPU, begin and end of each lease
        self.busy_s = [0.0] * gpus
        self.wakes = 0
        self.host_nbytes = 0
        self.now_s = 0.0
        for fault in faults:
            self._push(fault.at_s, LOST, fault.gpu)
            if fault.back_s is not None:
                self._push(fault.back_s, BACK, fault.gpu)
        for gpu in range(gpus):
            self._tell(ev.ExecutorUp(gpu, 1, self._stats(self._memory[gpu])))
        percentiles = [percentile] * len(models) if isinstance(percentile, float) else percentile
        for name, spec, deadline_s, share in zip(self._names, models, deadlines_s, percentiles, strict=True):
            self._tell(ev.FunctionKnown(name, deadline_s, share, 1.0))
            for instance in self._instances.of(name, spec.instances):
                self._tell(ev.InstanceKnown(instance, name))
                self._tell(ev.ModelSized(instance, 1, spec.nbytes))

    def run(
        self,
        times_s: npt.NDArray[np.float64],
        functions: npt.NDArray[np.int64],
        warm: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> npt.NDArray[np.float64]:
        """Latency of each request in seconds, nan if it was never answered. Times ascend; the first ``warm`` requests
        only warm up. ``progress`` is told now and then how many have arrived.
        """
        self._warm = warm
        self.latency_s = np.full(len(times_s), np.nan)
        arrivals = times_s.tolist()
        who = functions.tolist()
        self._arrived, self._who = arrivals, who
        processes = self._processes
        if processes is not None:
            processes.know(times_s[warm:], functions[warm:])
        heap, names, deadlines, instances = self._heap, self._names, self._deadlines_s, self._instances
        index, count = 0, len(arrivals)
        tell = self._tell
        while index < count or heap:
            if index < count and (not heap or arrivals[index] <= heap[0][0]):
                self.now_s = now = arrivals[index]
                if self._outside is not None:
                    self._line_up(index, self._outside)
                elif processes is None:
                    function = who[index]
                    within_s = deadlines[function] if index >= warm else WARM_DEADLINE_S
                    name = names[function] if not instances.several else instances.take(names[function], index)
                    tell(ev.Asked(index, name, now + within_s, 1))
                else:
                    processes.asked(who[index], now)
                    self._ask(index)
                index += 1
                if progress is not None and index % REPORT_EVERY == 0:
                    progress(index)
                continue
            self.now_s, _, kind, what, version = heappop(heap)
            if kind == ENDED:
                if not what.lost:
                    self._ended(what)
            elif kind == TICK:
                if self.now_s == self._tick_s:  # else an earlier one has taken its place
                    self._tick_s = INFINITY
                    tell(ev.Tick())
            elif kind == COPIED:
                if version == what.version:
                    self._copied(what)
            else:
                self._rarely(kind, what, version)
        return self.latency_s

    def _rarely(self, kind: int, what: Any, version: int) -> None:
        """Events that most runs do not have."""
        if kind == BEGIN:
            if not what.lost:
                self._copy(what)
        elif kind == LOST:
            self._gpu_lost(what)
        elif kind == BACK:
            self._epochs[what] += 1
            self._tell(ev.ExecutorUp(what, self._epochs[what], self._stats(self._memory[what])))
        elif kind == STARTED:
            self._started(what)
        elif kind == ASKS:
            self._ask(what)
        elif self._processes is not None and version == self._processes.life[what]:
            self._leaves(what)

    def _push(self, at_s: float, kind: int, what: Any, version: int = 0) -> None:
        self._number += 1
        heappush(self._heap, (at_s, self._number, kind, what, version))

    @staticmethod
    def _stats(memory: Memory) -> PoolStats:
        free = memory.capacity_nbytes - memory.used_nbytes
        return PoolStats(free_nbytes=free, largest_nbytes=free)

    def _due(self, at_s: float, copy: Copy, version: int) -> None:
        self._number += 1
        heappush(self._heap, (at_s, self._number, COPIED, copy, version))

    def _tell(self, event: ev.Event) -> None:
        for action in self.core.handle(event, self.now_s):
            if type(action) is ev.WakeOn:
                self._wake(action)
            elif type(action) is ev.FinishLease:
                self.latency_s[action.request] = self.now_s - self._arrived[action.request]
                self._instances.free(action.request)
                if self._outside is not None:
                    self._answered(action.request, self._outside)
                elif self._processes is not None:
                    self._over(action.request)
            elif type(action) is ev.LoseLease:
                self._lost.append(action.request)
                self._instances.free(action.request)
            elif type(action) is ev.RefuseAsk and self._processes is not None:
                self._instances.free(action.request)
                self._processes.up[self._who[action.request]] = False  # a process that finds no room ends
                self._over(action.request)
        due_s = self.core.next_deadline_s
        if due_s is not None and due_s < self._tick_s:
            self._tick_s = due_s
            self._number += 1
            heappush(self._heap, (due_s, self._number, TICK, None, 0))

    # --- leases

    def _wake(self, wake: ev.WakeOn) -> None:
        gpu, name = wake.lease.gpu, wake.instance
        spec, memory = self._specs[name], self._memory[gpu]
        lease = self._running[gpu] = _Lease(wake, spec, self.now_s)
        resident, segments = memory.resident, self._segments[name]
        if len(segments) == 1:  # most have no more: this is where a simulation spends its time
            segment, nbytes = segments[0]
            there = resident.get(segment, 0)
            missing = nbytes - there
            if missing:
                lease.parts = ((segment, there, nbytes),)
        else:
            parts = [(segment, resident.get(segment, 0), nbytes) for segment, nbytes in segments]
            lease.parts = [part for part in parts if part[1] < part[2]]
            missing = sum(nbytes - there for _, there, nbytes in lease.parts)
        if missing and not self._reuse:
            lease.changed = memory.make_room(memory.capacity_nbytes, self._victims(gpu, name), True)
        lease.need = missing + spec.activation_nbytes
        self._try(gpu, lease)

    def _try(self, gpu: int, lease: _Lease) -> None:
        """Begin, if there can be room: what another GPU reads is waited for."""
        memory = self._memory[gpu]
        if lease.need > memory.capacity_nbytes - memory.used_nbytes:
            gone = memory.make_room(lease.need, self._victims(gpu, lease.wake.instance), self._whole)
            lease.changed = [*lease.changed, *gone] if lease.changed else gone
            if lease.need > memory.free_nbytes:
                assert memory.pins, "a wake did not fit"
                self._blocked[gpu] = lease
                return
        spec, now = lease.spec, self.now_s
        lease.began_s = now
        if spec.activation_nbytes:
            memory.hold(spec.activation_nbytes)
        for segment, there, nbytes in lease.parts:
            memory.add(segment, nbytes - there)
            if self._groups:
                memory.arriving[segment] = there
        if not lease.parts or self._processes is not None:
            memory.arriving.clear()
            self._push(now + self._run_s(spec), ENDED, lease)
        elif self._allocate:
            self._push(now + spec.allocate_s, BEGIN, lease)
        else:
            self._copy(lease)

    def _run_s(self, spec: ModelSpec) -> float:
        return self._runs.choice(spec.runs_s) if spec.runs_s else spec.run_s

    def _victims(self, gpu: int, instance: str) -> Iterable[str]:
        """Segments, least worth first. A base is worth the sum of what its users would lose with it, as the executor
        has it (gpuserver/residency.py).
        """
        if not self._groups:
            return map(_INSTANCE, self.core.victims(gpu))
        resident = self._memory[gpu].resident
        total: dict[str, float] = dict.fromkeys(resident, 0.0)
        for user, worth in self.core.worth(gpu).items():
            for segment, _ in self._segments[user]:
                if segment in total:
                    total[segment] += worth
        for segment, _ in self._segments[instance]:
            total.pop(segment, None)
        return sorted(total, key=total.__getitem__)

    def _copy(self, lease: _Lease) -> None:
        now, wake, spec = self.now_s, lease.wake, lease.spec
        gpu = wake.lease.gpu
        lease.runs_until_s = now + self._run_s(spec)
        source = None
        if wake.peers and self._topology.peer(wake.peers[0], gpu) > self._topology.host_bps:
            source = self._memory[wake.peers[0]]
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

    def _begin(self, lease: _Lease, nbytes: float, links: tuple[Link, ...]) -> Copy:
        copy = Copy(nbytes, links, lease)
        lease.open.append(copy)
        self._links.begin(copy, self.now_s)
        return copy

    def _copied(self, copy: Copy) -> None:
        now = self.now_s
        self._links.end(copy, now)
        lease: _Lease = copy.token
        lease.open.remove(copy)
        if copy is lease.from_peer:
            self._let_go(lease)
        if lease.open:
            return
        wake = lease.wake.lease
        self._memory[wake.gpu].arriving.clear()
        self._tell(ev.Woken(wake.gpu, wake.epoch, wake.serial, int((now - lease.began_s) * 1e6)))
        self._push(max(now, lease.runs_until_s) + lease.extra_s, ENDED, lease)

    def _let_go(self, lease: _Lease) -> None:
        """Nothing is read from another GPU any more."""
        source = lease.source
        lease.from_peer = lease.source = None
        if source is None:
            return
        for segment in lease.pinned:
            source.unpin(segment)
        for gpu, blocked in list(self._blocked.items()):
            if self._memory[gpu] is source:
                del self._blocked[gpu]
                self._try(gpu, blocked)

    def _ended(self, lease: _Lease) -> None:
        wake = lease.wake
        gpu = wake.lease.gpu
        memory = self._memory[gpu]
        self._running[gpu] = None
        if lease.spec.activation_nbytes:
            memory.hold(0)
        if wake.request >= self._warm:
            self.busy_s[gpu] += self.now_s - lease.started_s
            if self.on_busy is not None:
                self.on_busy(gpu, lease.started_s, self.now_s)
            self.wakes += lease.copied > 0
            self.host_nbytes += lease.copied - lease.peer
        done = Done(
            serial=wake.lease.serial,
            outcome="ended",
            gpu_us=int((self.now_s - lease.started_s) * 1e6),
            copied_nbytes=lease.copied,
            peer_nbytes=lease.peer,
            file_nbytes=0,
            resident=self._changed(lease, memory) if lease.parts or lease.changed else [],
            peak_activation_nbytes=lease.spec.activation_nbytes,
            version=1,
            stats=self._stats(memory),
            peers=[wake.peers[0]] if lease.peer else [],
        )
        self._tell(ev.LeaseOver(gpu, wake.lease.epoch, done))

    def _changed(self, lease: _Lease, memory: Memory) -> list[tuple[str, int]]:
        """What instances have here now, of which a lease has changed something: with a base, of all who share it."""
        if not self._groups:
            return [*lease.changed, *((segment, nbytes) for segment, _, nbytes in lease.parts)]
        segments = [*(segment for segment, _ in lease.changed), *(segment for segment, _, _ in lease.parts)]
        users = [user for segment in segments for user in self._groups.get(segment, (segment,))]
        return [
            (user, sum(memory.resident.get(segment, 0) for segment, _ in self._segments[user]))
            for user in dict.fromkeys(users)
        ]

    # --- GPUs that are lost

    def _gpu_lost(self, gpu: int) -> None:
        """A lease in execution goes with it. Who copies from it has the rest from the host, as an executor does that
        finds a source gone.
        """
        now, memory, lease = self.now_s, self._memory[gpu], self._running[gpu]
        self._memory[gpu] = Memory(memory.capacity_nbytes)
        self._running[gpu] = None
        self._blocked.pop(gpu, None)
        if lease is not None:
            lease.lost = True
            for copy in lease.open:
                self._links.end(copy, now)
            if lease.wake.request >= self._warm:
                self.busy_s[gpu] += now - lease.started_s
                if self.on_busy is not None:
                    self.on_busy(gpu, lease.started_s, now)
            self._let_go(lease)
        for reader in self._running:
            if reader is not None and reader.source is memory and (read := reader.from_peer) is not None:
                left = read.left - read.rate * (now - read.at_s)
                self._links.end(read, now)
                reader.open.remove(read)
                reader.from_peer = reader.source = None
                reader.peer -= max(0, int(left))
                self._begin(reader, max(0.0, left), self._wires.host(reader.wake.lease.gpu))
        if self._processes is not None:
            for name in memory.resident:
                self._processes.up[self._names.index(name)] = False
        self._tell(ev.ExecutorDown(gpu))
        lost, self._lost = self._lost, []
        for request in lost:
            name = self._names[self._who[request]]
            if self._specs[name].idempotent and request not in self._again:
                self._again.add(request)
                self._ask(request)
            elif self._processes is not None:
                self._over(request)

    # --- a real node's router: a function has one instance, so the scheduler hears of one of its requests at a time

    def _line_up(self, request: int, outside: Outside) -> None:
        line = self._lines[self._who[request]]
        line.append(request)
        if len(line) == 1:
            self._push(self.now_s + outside.before_s, ASKS, request)

    def _answered(self, request: int, outside: Outside) -> None:
        self.latency_s[request] += outside.after_s
        line = self._lines[self._who[request]]
        line.popleft()
        if line:
            self._push(self.now_s + outside.turn_s, ASKS, line[0])

    # --- processes of functions (baselines.py)

    def _ask(self, request: int) -> None:
        """For a lease, once there is a process. Those that warm up find one."""
        function, processes = self._who[request], self._processes
        if processes is not None:
            if not processes.up[function] and request >= self._warm:
                waiting = processes.starting[function]
                if waiting is None:
                    waiting = processes.starting[function] = []
                    self._push(self.now_s + self._specs[self._names[function]].cold_start_s, STARTED, function)
                waiting.append(request)
                return
            processes.up[function] = True
        within_s = self._deadlines_s[function] if request >= self._warm else WARM_DEADLINE_S
        name = self._instances.take(self._names[function], request)
        self._tell(ev.Asked(request, name, self._arrived[request] + within_s, 1))

    def _started(self, function: int) -> None:
        assert self._processes is not None
        waiting, self._processes.starting[function] = self._processes.starting[function], None
        for request in waiting or ():
            self._processes.up[function] = True  # also if one before it was refused: they have waited for this start
            self._ask(request)

    def _over(self, request: int) -> None:
        """A request of a process has met its fate."""
        assert self._processes is not None
        function = self._who[request]
        leaves_s = self._processes.over(function, self.now_s)
        if leaves_s is not None:
            self._push(leaves_s, LEAVES, function, self._processes.life[function])

    def _leaves(self, function: int) -> None:
        """An idle process ends, and its GPU has its memory again."""
        assert self._processes is not None
        self._processes.up[function] = False
        name = self._names[function]
        for gpu, memory in enumerate(self._memory):
            if name in memory.resident:
                memory.used_nbytes -= memory.resident.pop(name)
                self._tell(ev.Evicted(gpu, self._epochs[gpu], ((name, 0),), self._stats(memory)))
