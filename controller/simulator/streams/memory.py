"""Memory for KV of simulated runtimes, which grows in extents. Pure. It comes from the GPU's pool: the cheapest unused
bytes leave for it, then seats without a turn.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol

from dormouse.controller.simulator.agenda import PRESSED, Agenda
from dormouse.controller.simulator.gpu import SimulatedGpu
from dormouse.controller.simulator.leases import SimulatedLease
from dormouse.controller.simulator.streams.model import EXTENTS
from dormouse.controller.simulator.streams.runtime import runtime_of
from dormouse.core.decisions.memory.bringing import spare

KV_OWNER: Final = "kv of "


class KvMachine(Protocol):
    """The part that knows the worth of models: executors.py."""

    def worth(self, gpu: int) -> dict[str, float]: ...

    @property
    def host_bps(self) -> float: ...


class KvMemory:
    """Of one node."""

    def __init__(self, machine: KvMachine, gpus: Sequence[SimulatedGpu], agenda: Agenda) -> None:
        self._machine, self._gpus, self._agenda = machine, gpus, agenda
        self.offload = "asked"  # as in schemas/policy.py

    def grow(self, lease: SimulatedLease, blocks: int, gently: bool) -> bool:
        """Needed blocks take the memory of others; those wished beside them, free or idle memory."""
        wanted = -(-blocks // runtime_of(lease).extent_blocks)
        if not self._place(lease, wanted, gently):
            return False
        if not gently and wanted < EXTENTS:
            self._place(lease, EXTENTS - wanted, gently=True)
        return True

    def plenty(self, lease: SimulatedLease, blocks: int) -> bool:
        """Whether `grow` would give so many, and what is wished beside them, and nothing would leave for that."""
        gpu, runtime = self._gpus[lease.wake.lease.gpu], runtime_of(lease)
        extents = 2 * -(-blocks // runtime.extent_blocks) + EXTENTS
        nbytes = 2 * extents * runtime.extent_blocks * runtime.block_nbytes  # as much stays free
        pool = gpu.residency.pool
        return pool.largest_nbytes >= nbytes + gpu.reserved_nbytes and len(gpu.contexts) == len(gpu.told)

    def _place(self, lease: SimulatedLease, extents: int, gently: bool) -> bool:
        gpu, runtime = self._gpus[lease.wake.lease.gpu], runtime_of(lease)
        more = extents * runtime.extent_blocks
        nbytes = more * runtime.block_nbytes
        name, worth = lease.wake.instance, partial(self._machine.worth, gpu.number)
        evict = self.offload != "never" or runtime.batch.blocks + more <= runtime.batch.one_needs
        reserved_nbytes = gpu.reserved_nbytes
        free = gpu.residency.pool.free_nbytes - reserved_nbytes >= nbytes
        while True:
            grown = gpu.residency.grow(
                name, 1, nbytes, worth, self._machine.host_bps,
                owner=KV_OWNER + name, reserve_nbytes=reserved_nbytes, evict=evict and not free,
            )  # fmt: skip
            if grown is not None:
                break
            if free:
                free = False  # but not in one place
                continue
            if gently or not evict or not (gpu.one_ends() or gpu.one_leaves()):
                return False
            reserved_nbytes = gpu.reserved_nbytes
        for move in grown[1].moves:
            gpu.residency.arrived(move.segment)
        evicted = list(grown[1].evicted)
        if self.offload == "ahead":  # making room takes no time here, so no more is kept free
            short_nbytes = nbytes + reserved_nbytes - gpu.residency.pool.free_nbytes
            if short_nbytes > 0:
                evicted += spare(gpu.residency, short_nbytes, worth(), self._machine.host_bps).evicted
        if evicted or len(gpu.contexts) != len(gpu.told):
            self._agenda.put(self._agenda.now_s, PRESSED, lease)
        runtime.batch.blocks += more
        return True
