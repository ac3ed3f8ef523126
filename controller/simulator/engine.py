"""Runs the scheduling core against simulated devices: the same `Scheduler`, another clock. Deterministic."""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dormouse.controller import events as ev
from dormouse.controller.scheduler import Scheduler
from dormouse.controller.simulator.devices import Memory, ModelSpec, Wires
from dormouse.controller.simulator.links import Copy, Links
from dormouse.controller.topology import Topology
from dormouse.schemas.messages import Done, PoolStats
from dormouse.schemas.policy import Policy

COPIED, ENDED, TICK = 0, 1, 2

INFINITY = float("inf")

WARM_DEADLINE_S: Final = 60.0
"""Of requests that are not counted: none of them is late, or the core would think that functions do not comply."""

REPORT_EVERY: Final = 8192
"""Arrivals between two calls of ``progress``."""


class _Lease:
    """``open`` are copies that have not arrived; ``copied`` bytes, ``peer`` of them from another GPU; ``changed`` is
    what is left of models that made room.
    """

    __slots__ = ("changed", "copied", "extra_s", "open", "peer", "runs_until_s", "started_s", "wake")

    def __init__(self, wake: ev.WakeOn, started_s: float, run_s: float, missing: int) -> None:
        self.wake = wake
        self.started_s = started_s
        self.runs_until_s = started_s + run_s
        self.copied = missing
        self.peer = 0
        self.extra_s = 0.0
        self.open = 0
        self.changed: list[tuple[str, int]] = []


class Simulation:
    """One run. ``models[f]`` is function f's, ``deadlines_s[f]`` its deadline, ``percentile`` (in (0, 1)) that of all
    functions or one for each. ``busy_s``, ``wakes`` and ``host_nbytes`` count leases of all but the warm requests.
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
    ) -> None:
        self.core = Scheduler(seed=seed, revoke_s=1.0, max_waiting=1 << 30, policy=policy, topology=topology)
        self._heap: list[tuple[float, int, int, Any, int]] = []
        self._number = 0
        self._links = Links(self._due)
        self._wires = Wires(topology, range(gpus))
        self._topology = topology
        self._memory = [Memory(gpu_nbytes) for _ in range(gpus)]
        self._names = [f"f{i}" for i in range(len(models))]
        self._specs = dict(zip(self._names, models, strict=True))
        self._deadlines_s = list(deadlines_s)
        self._whole = policy.eviction in ("lru", "torpor")
        self._warm = 0
        self._tick_s = INFINITY  # when the next Tick comes
        self.busy_s = [0.0] * gpus
        self.wakes = 0
        self.host_nbytes = 0
        self.now_s = 0.0
        for gpu in range(gpus):
            self._tell(ev.ExecutorUp(gpu, 1, PoolStats(free_nbytes=gpu_nbytes, largest_nbytes=gpu_nbytes)))
        percentiles = [percentile] * len(models) if isinstance(percentile, float) else percentile
        for name, spec, deadline_s, share in zip(self._names, models, deadlines_s, percentiles, strict=True):
            self._tell(ev.FunctionKnown(name, deadline_s, share, 1.0))
            self._tell(ev.InstanceKnown(name, name))
            self._tell(ev.ModelSized(name, 1, spec.nbytes))

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
        self._arrived = arrivals
        heap, names, deadlines = self._heap, self._names, self._deadlines_s
        index, count = 0, len(arrivals)
        tell = self._tell
        while index < count or heap:
            if index < count and (not heap or arrivals[index] <= heap[0][0]):
                self.now_s = now = arrivals[index]
                function = who[index]
                within_s = deadlines[function] if index >= warm else WARM_DEADLINE_S
                tell(ev.Asked(index, names[function], now + within_s, 1))
                index += 1
                if progress is not None and index % REPORT_EVERY == 0:
                    progress(index)
                continue
            self.now_s, _, kind, what, version = heappop(heap)
            if kind == ENDED:
                self._ended(what)
            elif kind == TICK:
                self._tick_s = INFINITY
                tell(ev.Tick())
            elif version == what.version:
                self._copied(what)
        return self.latency_s

    def _due(self, at_s: float, copy: Copy, version: int) -> None:
        self._number += 1
        heappush(self._heap, (at_s, self._number, COPIED, copy, version))

    def _tell(self, event: ev.Event) -> None:
        for action in self.core.handle(event, self.now_s):
            if type(action) is ev.WakeOn:
                self._wake(action)
            elif type(action) is ev.FinishLease:
                self.latency_s[action.request] = self.now_s - self._arrived[action.request]
        due_s = self.core.next_deadline_s
        if due_s is not None and due_s < self._tick_s:
            self._tick_s = due_s
            self._number += 1
            heappush(self._heap, (due_s, self._number, TICK, None, 0))

    def _wake(self, wake: ev.WakeOn) -> None:
        now, gpu, name = self.now_s, wake.lease.gpu, wake.instance
        spec, memory = self._specs[name], self._memory[gpu]
        there = memory.resident.get(name, 0)
        missing = spec.nbytes - there
        lease = _Lease(wake, now, spec.run_s, missing)
        if not missing:
            self._end_at(lease.runs_until_s, lease)
            return
        if missing > memory.free_nbytes:
            lease.changed = memory.make_room(missing, self.core.victims(gpu), self._whole)
        memory.add(name, missing)
        peer = 0
        if wake.peers and self._topology.peer(wake.peers[0], gpu) > self._topology.host_bps:
            peer = max(0, min(spec.nbytes, self._memory[wake.peers[0]].resident.get(name, 0)) - there)
        lease.extra_s = (spec.extra_s * (missing - peer) + spec.peer_extra_s * peer) / spec.nbytes
        lease.peer = peer
        if peer:
            lease.open += 1
            self._links.begin(Copy(peer, self._wires.peer(wake.peers[0], gpu), lease), now)
        if missing > peer:
            lease.open += 1
            self._links.begin(Copy(missing - peer, self._wires.host(gpu), lease), now)

    def _copied(self, copy: Copy) -> None:
        now = self.now_s
        self._links.end(copy, now)
        lease: _Lease = copy.token
        lease.open -= 1
        if lease.open:
            return
        wake = lease.wake.lease
        self._tell(ev.Woken(wake.gpu, wake.epoch, wake.serial, int((now - lease.started_s) * 1e6)))
        self._end_at(max(now, lease.runs_until_s) + lease.extra_s, lease)

    def _end_at(self, at_s: float, lease: _Lease) -> None:
        self._number += 1
        heappush(self._heap, (at_s, self._number, ENDED, lease, 0))

    def _ended(self, lease: _Lease) -> None:
        wake = lease.wake
        gpu = wake.lease.gpu
        memory = self._memory[gpu]
        if wake.request >= self._warm:
            self.busy_s[gpu] += self.now_s - lease.started_s
            self.wakes += lease.copied > 0
            self.host_nbytes += lease.copied - lease.peer
        free = memory.free_nbytes
        done = Done(
            serial=wake.lease.serial,
            outcome="ended",
            gpu_us=int((self.now_s - lease.started_s) * 1e6),
            copied_nbytes=lease.copied,
            peer_nbytes=lease.peer,
            file_nbytes=0,
            resident=[*lease.changed, (wake.instance, memory.resident[wake.instance])] if lease.copied else [],
            peak_activation_nbytes=0,
            version=1,
            stats=PoolStats(free_nbytes=free, largest_nbytes=free),
        )
        self._tell(ev.LeaseOver(gpu, wake.lease.epoch, done))
