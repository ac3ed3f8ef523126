"""Models that simulated GPUs are given before any request, as core/decisions/leases/preloads.py does it. Pure.

One comes to a GPU at a time, in the order of its segments, from a GPU that has all that is missing, or from the host.
It is given up for any other work there: segments that have arrived stay. The runtime of a language model is there when
it would have been for a lease, if none comes before.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from dormouse.controller.simulator.agenda import PRELOADED, RUNTIME, Agenda
from dormouse.controller.simulator.devices import ModelSpec, Wires
from dormouse.controller.simulator.gpu import SimulatedGpu
from dormouse.controller.simulator.links import Links, SimulatedCopy
from dormouse.core.decisions.memory.bringing import bring, owner_of
from dormouse.core.decisions.memory.residency import Residency
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.topology import Topology


class SimulatedPreload:
    """``missing`` as in a lease. ``source`` has ``pinned`` segments for it, if that is another GPU."""

    __slots__ = ("copy", "instance", "missing", "number", "pinned", "source")

    def __init__(self, number: int, instance: str, missing: Sequence[tuple[int, int, int]]) -> None:
        self.number, self.instance, self.missing = number, instance, missing
        self.source: Residency | None = None
        self.pinned: Sequence[int] = ()
        self.copy: SimulatedCopy | None = None


class Preloads:
    """Those of one node. ``worth`` is the core's, of a GPU and a model that comes there."""

    def __init__(
        self,
        gpus: Sequence[SimulatedGpu],
        topology: Topology,
        wires: Wires,
        links: Links,
        worth: Callable[[int, str], dict[str, float]],
        agenda: Agenda,
        specs: Mapping[str, ModelSpec],
    ) -> None:
        self._specs = specs
        self._gpus, self._topology, self._wires, self._links = gpus, topology, wires, links
        self._worth, self._agenda = worth, agenda
        self._under_way: dict[int, SimulatedPreload] = {}  # by GPU
        self.held = False  # nobody else computes meanwhile, and none is given up
        self.freed: Callable[[SimulatedGpu], None] = lambda gpu: None  # receives a GPU that was held

    def holds(self, number: int) -> bool:
        return self.held and number in self._under_way

    def begin(self, order: ev.PreloadOn) -> None:
        gpu, name = self._gpus[order.gpu], order.instance
        residency = gpu.residency
        if gpu.number in self._under_way or gpu.busy or residency.coming(name):
            self._say(gpu, name, "busy", 0)
            return
        worth = partial(self._worth, gpu.number, name)
        reserve_nbytes = gpu.reserved_nbytes
        plan = bring(residency, name, worth, self._topology.host_bps, reserve_nbytes=reserve_nbytes)
        if plan is None:
            self._say(gpu, name, "refused", 0)
            return
        for change in plan.plans:
            for move in change.moves:
                residency.arrived(move.segment)
        if (llm := self._specs[name].llm) is not None and name not in gpu.contexts:
            self._agenda.put(self._agenda.now_s + llm.start_s, RUNTIME, (gpu, gpu.epoch, name))
        preload = self._under_way[gpu.number] = SimulatedPreload(gpu.number, name, plan.missing)
        nbytes = sum([nbytes for _, _, nbytes in plan.missing])
        if not nbytes:
            self._over(preload, "there", len(plan.missing))
            return
        wires = self._wires.host(gpu.number)
        if order.peers and self._topology.peer(order.peers[0], gpu.number) > self._topology.host_bps:
            source = self._gpus[order.peers[0]].residency
            pinned = [segment for segment, _ in source.pin(segment for segment, _, _ in plan.missing)]
            preload.source, preload.pinned = source, pinned
            if len(pinned) == len(plan.missing):
                wires = self._wires.peer(order.peers[0], gpu.number)
        preload.copy = SimulatedCopy(nbytes, wires, preload)
        self._links.begin(preload.copy, self._agenda.now_s)

    def opened(self, gpu: SimulatedGpu, epoch: int, name: str) -> None:
        """A runtime's process, if the GPU has not been lost since."""
        if epoch == gpu.epoch and (llm := self._specs[name].llm) is not None:
            gpu.open_runtime(name, llm)
            gpu.told = tuple(gpu.contexts)
            self._agenda.put(self._agenda.now_s, PRELOADED, ev.RuntimesOn(gpu.number, gpu.epoch, gpu.told))

    def copied(self, copy: SimulatedCopy) -> None:
        preload: SimulatedPreload = copy.token
        self._links.end(copy, self._agenda.now_s)
        self._over(preload, "there", len(preload.missing))

    def stop(self, number: int) -> bool:
        """Others need the GPU, or its link. False: there is none, or it holds the GPU."""
        preload = self._under_way.get(number)
        if preload is None or (copy := preload.copy) is None or self.held:
            return False
        now_s = self._agenda.now_s
        left = copy.left - copy.rate * (now_s - copy.at_s)
        done = sum([nbytes for _, _, nbytes in preload.missing]) - left
        count = 0
        for _, _, nbytes in preload.missing:
            done -= nbytes
            if done < -0.5:  # a copy is that much inexact
                break
            count += 1
        self._links.end(copy, now_s)
        self._over(preload, "yielded", count)
        return True

    def _over(self, preload: SimulatedPreload, outcome: str, count: int) -> None:
        """So many segments have come."""
        del self._under_way[preload.number]
        gpu, residency = self._gpus[preload.number], self._gpus[preload.number].residency
        for segment, _, _ in preload.missing[:count]:
            residency.arrived(segment)
        residency.leave(owner_of(preload.instance))
        residency.forget([segment for segment, _, _ in preload.missing[count:]])
        self._let_go(preload)
        copied_nbytes = sum([nbytes for _, _, nbytes in preload.missing[:count]])
        self._say(gpu, preload.instance, outcome, copied_nbytes)
        if self.held:
            self.freed(gpu)

    def _let_go(self, preload: SimulatedPreload) -> None:
        if preload.source is not None:
            preload.source.let_go(preload.pinned)

    def _say(self, gpu: SimulatedGpu, instance: str, outcome: str, copied_nbytes: int) -> None:
        resident = tuple(gpu.residency.changed())
        said = ev.PreloadOver(gpu.number, gpu.epoch, instance, outcome, copied_nbytes, resident, gpu.stats)
        self._agenda.put(self._agenda.now_s, PRELOADED, said)

    def lost(self, number: int) -> None:
        """The GPU is, with all that came to it; and others' copies from it do not come."""
        residency = self._gpus[number].residency
        for preload in list(self._under_way.values()):
            if preload.number == number:
                del self._under_way[number]
                if preload.copy is not None:
                    self._links.end(preload.copy, self._agenda.now_s)
                self._let_go(preload)
            elif preload.source is residency:
                preload.source = None
                self.stop(preload.number)
