"""A simulated GPU: its memory, as an executor has it (decisions/memory/), and the leases there. Pure."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Final

from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.leases import SimulatedLease, seat_of
from dormouse.controller.simulator.streams.model import LlmSpec
from dormouse.core.decisions.memory.models import KnownModels, ModelLayout
from dormouse.core.decisions.memory.pools.ideal import Ideal
from dormouse.core.decisions.memory.pools.protocol import Pool
from dormouse.core.decisions.memory.pools.regions import Regions
from dormouse.core.decisions.memory.residency import Residency
from dormouse.core.decisions.memory.wake_plan import ModelTooLarge, WakePlan
from dormouse.core.decisions.rules.pace import SHARED_S
from dormouse.schemas.messages import PoolStats

POOLS: Final[dict[str, Callable[[int], Pool]]] = {"ideal": Ideal, "exact": Regions}
"""Pools that ``--pools`` may name: bytes that need not lie together, or an executor's own planning of addresses."""

MOVE_BPS: Final = 300e9
"""Bytes that a GPU moves in its own memory per second (pools/planning.py)."""


class SimulatedGpu:
    """``leases`` are by serial; ``blocked`` are those of them that wait for room, in their order. ``contexts`` are
    bytes of runtimes that have a process here, by instance, the last used one last, and ``told`` those that the core
    knows of. ``lent``: a runtime has a step in another's turn. ``ordinary_s``: when a function's lease has last begun
    or ended.
    """

    __slots__ = (
        *("activation_nbytes", "blocked", "contexts", "epoch", "leases", "lent", "number", "ordinary_s", "pool"),
        *("residency", "told"),
    )

    def __init__(self, number: int, pool: Callable[[], Pool], models: KnownModels) -> None:
        self.number = number
        self.pool = pool
        self.epoch = 1
        self.residency = Residency(pool(), models)
        self.leases: dict[int, SimulatedLease] = {}
        self.blocked: list[SimulatedLease] = []
        self.activation_nbytes = 0  # of leases that have a seat
        self.contexts: dict[str, int] = {}
        self.told: tuple[str, ...] = ()
        self.lent = False
        self.ordinary_s = float("-inf")

    @property
    def reserved_nbytes(self) -> int:
        """Beside models: activations, and runtimes' processes."""
        return self.activation_nbytes + sum(self.contexts.values()) if self.contexts else self.activation_nbytes

    @property
    def stats(self) -> PoolStats:
        reserved = self.reserved_nbytes
        free = self.residency.pool.free_nbytes - reserved
        return PoolStats(free_nbytes=free, weights_nbytes=self.residency.occupied_nbytes + reserved)

    def shared(self, now_s: float) -> bool:
        """Whether functions compute here, or are likely to: steps are brief then."""
        if now_s < self.ordinary_s + SHARED_S:
            return True
        return any(lease.runtime is None and lease.seat is not None for lease in self.leases.values())

    @property
    def busy(self) -> bool:
        """Whether anybody computes there, or waits to."""
        if self.blocked:
            return True
        for lease in self.leases.values():
            seat = lease.seat
            if lease.runtime is not None:
                if lease.open or lease.runtime.batch.count:
                    return True
            elif seat is None or (seat.paused_s is None and not seat.idle):
                return True
        return False

    def seat(self, lease: SimulatedLease, worth: Callable[[int], dict[str, float]], host_bps: float) -> WakePlan | None:
        """Room for its model and its activations; None if there is not enough, because others compute here, or read
        what is in the way. The lease that has had no turn for longest leaves its seat first.
        """
        residency, name = self.residency, lease.wake.instance
        known = partial(worth, self.number)
        llm = lease.spec.llm
        context_nbytes = llm.context_nbytes if llm is not None and name not in self.contexts else 0
        while True:
            reserve_nbytes = self.reserved_nbytes + lease.spec.activation_nbytes + context_nbytes
            alone = residency.seats.none
            try:
                plan = residency.wake(name, known, host_bps, reserve_nbytes=reserve_nbytes, alone=alone)
            except ModelTooLarge:
                if self.one_ends(name):
                    continue
                assert not alone, "a wake did not fit"
                if not self.one_leaves():
                    return None
            else:
                self.activation_nbytes += lease.spec.activation_nbytes
                if lease.runtime is not None:
                    lease.runtime.cold = name not in self.contexts
                    self.contexts[name] = self.contexts.pop(name, context_nbytes)
                return plan

    def open_runtime(self, name: str, llm: LlmSpec) -> None:
        """Its process is there, without a seat, if there is room for that."""
        if name not in self.contexts and self.residency.pool.free_nbytes - self.reserved_nbytes >= llm.context_nbytes:
            self.contexts[name] = llm.context_nbytes

    def one_ends(self, but: str = "") -> bool:
        """The process of a runtime without a seat ends, that which was used longest ago; False if there is none."""
        seats = {lease.wake.instance for lease in self.leases.values() if lease.seat is None or lease.seat.here}
        for name, nbytes in self.contexts.items():
            if nbytes and name not in seats and name != but:
                del self.contexts[name]
                return True
        return False

    def one_leaves(self) -> bool:
        """The seat without a turn for longest is left; False if there is none."""
        paused = [
            (seat.paused_s, serial)
            for serial, lease in self.leases.items()
            if (seat := lease.seat) is not None and seat.here and seat.paused_s is not None
            if seat.computing is None
        ]
        if not paused:
            return False
        lease = self.leases[min(paused)[1]]
        seat_of(lease).here = False
        self.leave(lease)
        return True

    def leave(self, lease: SimulatedLease) -> None:
        """Its seat is given up, and with it what only it had: KV."""
        if lease.runtime is not None:
            self.residency.forget(list(self.residency.claimed(lease.wake.instance)))
            lease.runtime.left()
        self.residency.leave(lease.wake.instance)
        self.activation_nbytes -= lease.spec.activation_nbytes

    def release(self, name: str) -> None:
        """Its process ends, and what nobody else has a seat with is forgotten."""
        self.contexts.pop(name, None)
        segments = self.residency.models.by_instance[name].nbytes
        self.residency.forget([segment for segment in segments if not self.residency.seats.held(segment)])

    def lost(self) -> dict[int, SimulatedLease]:
        """It comes back empty. Returns the leases that it had."""
        leases, self.leases = self.leases, {}
        self.residency = Residency(self.pool(), self.residency.models)
        self.blocked, self.activation_nbytes, self.contexts, self.told = [], 0, {}, ()
        self.lent = False
        self.epoch += 1
        return leases


def known_models(families: Iterable[tuple[Sequence[str], ModelSpec]]) -> KnownModels:
    """A function's instances all have the same segments, and models of one base have its segments in common."""
    models, numbers = KnownModels(), count()
    bases: dict[str, list[tuple[int, int]]] = {}

    def cut(nbytes: int, most: int) -> list[tuple[int, int]]:
        starts = range(0, nbytes, most or nbytes or 1)
        return [(next(numbers), min(nbytes - start, most or nbytes)) for start in starts]

    for instances, spec in families:
        if spec.base_nbytes and spec.base not in bases:
            bases[spec.base] = cut(spec.base_nbytes, spec.segment_nbytes)
        base = bases[spec.base] if spec.base_nbytes else []
        layout = ModelLayout([*base, *cut(spec.nbytes - spec.base_nbytes, spec.segment_nbytes)])
        for instance in instances:
            models.learn(instance, layout)
    return models
