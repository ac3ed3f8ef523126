"""Simulated models, faults, times of requests outside GPUs, and the links between memories."""

from collections.abc import Iterable

import msgspec

from dormouse.controller.simulator.links import SimulatedLink
from dormouse.controller.simulator.streams.model import LlmSpec
from dormouse.core.decisions.scheduling.topology import Topology


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model as scenarios describe it. Times in seconds.

    ``run_s`` is a request whose model is resident, without ``host_s``, which it spends on the host after its first half
    and gives the GPU nothing; ``extra_s`` and ``peer_extra_s`` are what a wake of the whole model
    adds beyond the longer of run and copy, from the host and from another GPU. ``activation_nbytes`` are needed beside
    the model while a request runs. ``base_nbytes`` of the model are content that all models of the same ``base`` have;
    that and the rest are in segments of ``segment_nbytes`` (0: one each), which are copied and evicted as one.
    ``idempotent``: a request that is lost is asked once more. ``runs_s``: measured run times, of which each request has
    one by the seed, where ``run_s`` is their mean. The others are for baselines.py: memory and run time of a
    process of its own, how long one takes to start, and how long a wake allocates memory. ``instances`` of each
    function may run at once, each on a GPU of its own; they are there from the beginning. ``batch``: its requests come
    in batches of so many at most (0: one by one), which wait for more for ``batch_wait_s`` and take ``per_request_s``
    for each after the first, for which ``run_s`` is. With those, and with ``llm``, there may be ``max_instances`` (0:
    one for each GPU), of which all but the first come and go, and take ``load_s`` until they serve. ``llm``: it is a
    language model; then ``run_s`` is a stream of mean lengths, alone.
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
    max_instances: int = 1
    load_s: float = 0.0
    batch: int = 0
    batch_wait_s: float = 0.0
    per_request_s: float = 0.0
    segment_nbytes: int = 0
    llm: LlmSpec | None = None
    tenant: str = "default"


class OutsideLease(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that a request of a real node takes outside its lease, as a node was measured. Without it a request
    asks for a lease when it arrives, and is answered when that ends.

    ``before_s``: from its arrival until the scheduler learns of it, if its function is idle; ``turn_s``: from the end
    of a function's lease until the scheduler learns of its next request, which waits in the router; ``after_s``: from
    the end of the lease until the client has the answer, which may be a little earlier.
    """

    before_s: float
    turn_s: float
    after_s: float


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU is lost or, with ``drain``, given up when nothing runs there any more; unless ``back_s`` is None, it comes
    back empty. Seconds.
    """

    gpu: int
    at_s: float
    back_s: float | None = None
    drain: bool = False


class Wires:
    """One link object for each wire of a topology."""

    def __init__(self, topology: Topology, gpus: Iterable[int]) -> None:
        self._topology = topology
        self._host = {gpu: SimulatedLink(topology.host_bps, f"host-gpu{gpu}") for gpu in gpus}
        self._switches: dict[int, SimulatedLink] = {}
        self._peers: dict[tuple[int, int], SimulatedLink] = {}

    def host(self, gpu: int) -> tuple[SimulatedLink, ...]:
        if self._topology.switch_bps <= 0.0:
            return (self._host[gpu],)
        number = self._topology.switch(gpu)
        switch = self._switches.get(number)
        if switch is None:
            switch = self._switches[number] = SimulatedLink(self._topology.switch_bps, f"switch{number}")
        return (self._host[gpu], switch)

    def peer(self, source: int, target: int) -> tuple[SimulatedLink, ...]:
        key = source, target
        if key not in self._peers:
            self._peers[key] = SimulatedLink(self._topology.peer(source, target), f"gpu{source}-gpu{target}")
        return (self._peers[key],)

    @property
    def busy_s(self) -> dict[str, float]:
        """How long each link has carried any bytes, by name."""
        links = [*self._host.values(), *self._switches.values(), *self._peers.values()]
        return {link.name: link.busy_s for link in links}
