"""What the simulator puts in the place of executors: the memory of a GPU, by segment and byte, and the links to it."""

from collections.abc import Iterable

import msgspec

from dormouse.controller.simulator.links import SimulatedLink
from dormouse.controller.topology import Topology


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model as scenarios describe it. Times in seconds.

    ``run_s`` is a request whose model is resident, without ``host_s``, which it spends on the host after its first half
    and gives the GPU nothing; ``extra_s`` and ``peer_extra_s`` are what a wake of the whole model
    adds beyond the longer of run and copy, from the host and from another GPU. ``activation_nbytes`` are needed beside
    the model while a request runs. ``base_nbytes`` of the model are content that all models of the same ``base`` have.
    ``idempotent``: a request that is lost is asked once more. ``runs_s``: measured run times, of which each request has
    one by the seed, where ``run_s`` is their mean. The others are for baselines.py: memory and run time of a
    process of its own, how long one takes to start, and how long a wake allocates memory. ``instances`` of each
    function may run at once, each on a GPU of its own; they are there from the beginning.
    """

    name: str
    nbytes: int
    run_s: float
    host_s: float = 0.0
    extra_s: float = 0.0
    peer_extra_s: float = 0.0
    activation_nbytes: int = 0
    base: str = ""
    base_nbytes: int = 0
    idempotent: bool = False
    runs_s: tuple[float, ...] = ()
    native_nbytes: int = 0
    native_run_s: float = 0.0
    cold_start_s: float = 0.0
    allocate_s: float = 0.0
    instances: int = 1

    def segments(self, instance: str) -> tuple[tuple[str, int], ...]:
        """Names and sizes of what an instance has: what it shares, and its own."""
        if not self.base_nbytes:
            return ((instance, self.nbytes),)
        return ((self.base, self.base_nbytes), (instance, self.nbytes - self.base_nbytes))


class OutsideLease(msgspec.Struct, frozen=True, kw_only=True):
    """What a request of a real node takes outside its lease, in seconds, as a node was measured. Without it a request
    asks for a lease when it arrives, and is answered when that ends.

    ``before_s``: from its arrival until the scheduler hears of it, if its function is idle; ``turn_s``: from the end of
    a function's lease until the scheduler hears of its next request, which waits in the router; ``after_s``: from the
    end of the lease until the client has the answer, which may be a little earlier.
    """

    before_s: float
    turn_s: float
    after_s: float


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU is lost and, unless ``back_s`` is None, comes back empty. Seconds."""

    gpu: int
    at_s: float
    back_s: float | None = None


class SimulatedMemory:
    """What one GPU has, by segment: a model's own bytes, known by its instance, or a base that several share. A
    segment's first bytes are kept, its last are the first to go; one that another GPU reads stays.
    ``activation_nbytes`` are those of leases. ``arriving``: segments that a wake brings, with what was there
    before.
    """

    def __init__(self, capacity_nbytes: int) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.used_nbytes = 0  # activations included
        self.activation_nbytes = 0
        self.resident: dict[str, int] = {}
        self.arriving: dict[str, int] = {}
        self.pins: dict[str, int] = {}  # readers by segment

    @property
    def free_nbytes(self) -> int:
        return self.capacity_nbytes - self.used_nbytes

    def make_room(self, nbytes: int, victims: Iterable[str], whole: bool) -> list[tuple[str, int]]:
        """Evict until ``nbytes`` are free, segments as a ``whole`` or only as much as is needed; returns what is left
        of those that lost bytes. What others read may be in the way: then less is free.
        """
        left: list[tuple[str, int]] = []
        resident, pins = self.resident, self.pins
        short = nbytes - (self.capacity_nbytes - self.used_nbytes)
        for name in victims:
            if short <= 0:
                break
            if pins and name in pins:
                continue
            there = resident.get(name, 0)
            if not there:  # evicted before, while this lease waited for room
                continue
            gone = there if whole or there < short else short
            self.used_nbytes -= gone
            short -= gone
            if gone == there:
                del resident[name]
            else:
                resident[name] = there - gone
            left.append((name, there - gone))
        return left

    def add(self, segment: str, nbytes: int) -> None:
        self.resident[segment] = self.resident.get(segment, 0) + nbytes
        self.used_nbytes += nbytes

    def hold(self, nbytes: int) -> None:
        """So much more for a lease's activations; less than nothing when they go."""
        self.used_nbytes += nbytes
        self.activation_nbytes += nbytes

    def readable(self, segment: str) -> int:
        """Bytes that another GPU may read: those that are there."""
        if self.arriving and segment in self.arriving:
            return self.arriving[segment]
        return self.resident.get(segment, 0)

    def pin(self, segment: str) -> None:
        self.pins[segment] = self.pins.get(segment, 0) + 1

    def unpin(self, segment: str) -> None:
        if self.pins[segment] == 1:
            del self.pins[segment]
        else:
            self.pins[segment] -= 1


class Wires:
    """One link object for each wire of a topology."""

    def __init__(self, topology: Topology, gpus: Iterable[int]) -> None:
        self._topology = topology
        self._host = {gpu: SimulatedLink(topology.host_bps) for gpu in gpus}
        self._switches: dict[int, SimulatedLink] = {}
        self._peers: dict[tuple[int, int], SimulatedLink] = {}

    def host(self, gpu: int) -> tuple[SimulatedLink, ...]:
        if self._topology.switch_bps <= 0.0:
            return (self._host[gpu],)
        number = self._topology.switch(gpu)
        switch = self._switches.get(number)
        if switch is None:
            switch = self._switches[number] = SimulatedLink(self._topology.switch_bps)
        return (self._host[gpu], switch)

    def peer(self, source: int, target: int) -> tuple[SimulatedLink, ...]:
        key = source, target
        if key not in self._peers:
            self._peers[key] = SimulatedLink(self._topology.peer(source, target))
        return (self._peers[key],)
