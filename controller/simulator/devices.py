"""What the simulator puts in the place of executors: the memory of a GPU, by model and byte, and the links to it."""

from collections.abc import Iterable

import msgspec

from dormouse.controller.simulator.links import Link
from dormouse.controller.state import Model
from dormouse.controller.topology import Topology


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model as scenarios describe it. Times in seconds.

    ``run_s`` is a request whose model is resident; ``extra_s`` and ``peer_extra_s`` are what a wake of the whole model
    adds beyond the longer of run and copy, from the host and from another GPU.
    """

    name: str
    nbytes: int
    run_s: float
    extra_s: float = 0.0
    peer_extra_s: float = 0.0


class Memory:
    """The models on one GPU: a model's first bytes are kept, its last are the first to go."""

    def __init__(self, capacity_nbytes: int) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.used_nbytes = 0
        self.resident: dict[str, int] = {}

    @property
    def free_nbytes(self) -> int:
        return self.capacity_nbytes - self.used_nbytes

    def make_room(self, nbytes: int, victims: Iterable[Model], whole: bool) -> list[tuple[str, int]]:
        """Evict until ``nbytes`` are free, models as a ``whole`` or only as much as is needed; returns what is left of
        those that lost bytes.
        """
        left: list[tuple[str, int]] = []
        resident = self.resident
        short = nbytes - (self.capacity_nbytes - self.used_nbytes)
        for model in victims:
            if short <= 0:
                break
            name = model.instance
            there = resident[name]
            gone = there if whole or there < short else short
            self.used_nbytes -= gone
            short -= gone
            if gone == there:
                del resident[name]
            else:
                resident[name] = there - gone
            left.append((name, there - gone))
        assert short <= 0, "a wake did not fit"
        return left

    def add(self, instance: str, nbytes: int) -> None:
        self.resident[instance] = self.resident.get(instance, 0) + nbytes
        self.used_nbytes += nbytes


class Wires:
    """One link object for each wire of a topology."""

    def __init__(self, topology: Topology, gpus: Iterable[int]) -> None:
        self._topology = topology
        self._host = {gpu: Link(topology.host_bps) for gpu in gpus}
        self._switches: dict[int, Link] = {}
        self._peers: dict[tuple[int, int], Link] = {}

    def host(self, gpu: int) -> tuple[Link, ...]:
        if self._topology.switch_bps <= 0.0:
            return (self._host[gpu],)
        number = self._topology.switch(gpu)
        switch = self._switches.get(number)
        if switch is None:
            switch = self._switches[number] = Link(self._topology.switch_bps)
        return (self._host[gpu], switch)

    def peer(self, source: int, target: int) -> tuple[Link, ...]:
        key = source, target
        if key not in self._peers:
            self._peers[key] = Link(self._topology.peer(source, target))
        return (self._peers[key],)
