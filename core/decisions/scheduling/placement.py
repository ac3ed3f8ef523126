"""Choice of the GPU on which a request runs: pure. `PLACEMENT_CLASSES` has those that a policy may name."""

import random
from abc import ABC, abstractmethod
from typing import ClassVar, Final

from dormouse.core.decisions.scheduling.affinity import LATER, first_token_s, hardship, others_s
from dormouse.core.decisions.scheduling.keeping import Keeping
from dormouse.core.decisions.scheduling.state import Gpu, Model, Waiting
from dormouse.core.decisions.scheduling.topology import Bandwidths, shared_copy_s
from dormouse.schemas.policy import Policy

COPY_WEIGHT: Final = 1.0
"""A second of copying counts as so many more seconds until completion: it takes the link from neighbours, and the room
from models that will be copied again. docs/papers.md (placement) has the effects of other weights.
"""

SAFETY: Final = 0.1
"""Share of its deadline that a request which waits for a busy GPU must have left: the expected end may be late."""


class Placement(ABC):
    """Chooses GPUs. ``gpus`` are the scheduler's."""

    from_peers: ClassVar = True
    """Whether models are copied from GPU to GPU."""

    binds: ClassVar = False
    """Whether a model stays for good on the GPU that it came to first."""

    def __init__(
        self,
        policy: Policy,
        topology: Bandwidths,
        gpus: dict[int, Gpu],
        keeping: Keeping,
        rng: random.Random,
    ) -> None:
        self._topology = topology
        self._gpus = gpus
        self._keeping = keeping
        self._rng = rng
        self._await = policy.await_resident
        self._affinity = policy.affinity

    @abstractmethod
    def choose(self, waiting: Waiting, free: set[int], now_s: float, may_wait: bool) -> int | None:
        """One of the free GPUs; None to wait for a busy one, which ``held_for`` of the request then names; if it names
        none, there is none for it.
        """

    def by_first_token(self, model: Model) -> bool:
        """Whether it goes where its first token is expected soonest (affinity.py)."""
        return False

    def fitting(self, model: Model, free: set[int]) -> set[int]:
        """Those of the free GPUs that could hold it."""
        return {number for number in free if self._gpus[number].capacity_nbytes >= model.nbytes}

    def wait(self, waiting: Waiting) -> None:
        """All GPUs that could hold it are busy: it waits for the first of them."""
        nbytes = waiting.model.nbytes
        busy = [
            (gpu.leaves, gpu.running.ends_s if gpu.running else 0.0, n)
            for n, gpu in self._gpus.items()
            if (gpu.running or gpu.leaves) and gpu.capacity_nbytes >= nbytes
        ]
        waiting.held_for = min(busy)[2]

    # --- estimates

    def copy_s(self, model: Model, gpu: int, now_s: float) -> tuple[float, int, int | None]:
        """Seconds that the copies of a wake here would take, bytes of them that come from the host, and the GPU that
        the others come from.
        """
        topology = self._topology
        there = model.resident.get(gpu, 0)
        missing = model.nbytes - there
        if missing <= 0:
            return 0.0, 0, None
        peer, peer_s = None, 0.0
        if len(model.resident) > (there > 0) and self.from_peers:
            best = topology.host(gpu)
            for other, nbytes in model.resident.items():
                if nbytes > there and other != gpu and (bps := topology.peer(other, gpu)) > best:
                    best, peer = bps, other
            if peer is not None:
                nbytes = min(model.resident[peer] - there, missing)
                peer_s = nbytes / best
                missing -= nbytes
                if not missing:
                    return peer_s, 0, peer
        if not topology.switch_bps:
            host_s = missing / topology.host(gpu)
        else:
            others = self._copying(self._gpus[gpu], now_s)
            host_s = shared_copy_s(missing, others, topology.host(gpu), topology.switch_bps)
        return max(peer_s, host_s), missing, peer

    def _copying(self, gpu: Gpu, now_s: float) -> list[float]:
        """Bytes that neighbours still have to copy over the same switch."""
        left: list[float] = []
        for neighbour in gpu.neighbours:
            for running in neighbour.leases.values():
                if running.copying_nbytes and running.copies_until_s > now_s:
                    share = (running.copies_until_s - now_s) / (running.copies_until_s - running.started_s)
                    left.append(running.copying_nbytes * share)
        return left


class Completion(Placement):
    """The GPU with the earliest expected end, a copy counting twice its own time: fewest requests wait for a link."""

    def by_first_token(self, model: Model) -> bool:
        return self._affinity and model.runtime != ""

    def _soonest(self, waiting: Waiting, free: set[int], now_s: float, may_wait: bool) -> int | None:
        """Of free GPUs, and of busy ones that have something of it; of equal ones that with most room."""
        model, gpus = waiting.model, self._gpus
        found: list[tuple[int, float, int, int, float]] = []
        for number in free | model.resident.keys() if self._await and may_wait else free:
            copy_s, _, _ = self.copy_s(model, number, now_s)
            gpu, between_s = gpus[number], others_s(model, gpus[number])
            (first_s, later_s), running = first_token_s(model, gpu, copy_s, between_s), gpu.running
            if number not in free:
                if running is None or gpu.leaves or now_s >= running.overdue_s or gpu.capacity_nbytes < model.nbytes:
                    continue
                first_s += max(0.0, running.ends_s - now_s)
            cost_s, room = first_s + LATER * later_s + COPY_WEIGHT * copy_s, gpu.stats.free_nbytes
            found.append((hardship(model, gpu, between_s), cost_s, -room, number, first_s))
        *_, best, waiting.expected_s = min(found)
        if best in free:
            return best
        waiting.held_for = best
        return None

    def choose(self, waiting: Waiting, free: set[int], now_s: float, may_wait: bool) -> int | None:
        model, function = waiting.model, waiting.function
        if self.by_first_token(model):
            return self._soonest(waiting, free, now_s, may_wait)
        resident, nbytes = model.resident, model.nbytes
        for number in resident:
            if number in free and resident[number] >= nbytes:
                return number
        best, best_s, best_room = -1, float("inf"), -1
        for number in free:
            copy_s, _, _ = self.copy_s(model, number, now_s)
            seconds = function.predicted_s(copy_s, waiting.size) + COPY_WEIGHT * copy_s
            if seconds <= best_s:
                room = self._gpus[number].stats.free_nbytes
                if seconds < best_s or room > best_room:
                    best, best_s, best_room = number, seconds, room
        if not (self._await and may_wait):
            return best
        latest_s = waiting.deadline_s - SAFETY * (waiting.deadline_s - waiting.arrived_s)
        for number in resident:
            running = self._gpus[number].running
            if running is not None and number not in free and resident[number] >= nbytes:
                if self._gpus[number].leaves or now_s >= running.overdue_s:
                    continue  # its end is unknown
                seconds = max(0.0, running.ends_s - now_s) + function.run_of(waiting.size)
                if seconds < best_s and now_s + seconds < latest_s:
                    waiting.held_for = number
                    return None
        return best


class LeastInterference(Placement):
    """The GPU that has it, else one whose neighbour has it, else one whose neighbours load least: Torpor's Algorithm 1.
    A model that is nowhere yet comes to the GPUs in turn, as its prototype places functions when they are registered.
    """

    _turn = 0

    def choose(self, waiting: Waiting, free: set[int], now_s: float, may_wait: bool) -> int | None:
        """Of several GPUs that it allows the first, or the next."""
        model = waiting.model
        order = sorted(free)
        if not model.resident:
            order.sort(key=lambda number: (number < self._turn, number))
            self._turn = (self._turn + 1) % len(self._gpus)
        full = [number for number, nbytes in model.resident.items() if nbytes >= model.nbytes]
        if full:
            for number in order:
                if number in full:
                    return number
            fastest, best = max((self._topology.peer(a, b), -b) for a in full for b in order)
            if fastest > 0.0:
                return -best
        return min(order, key=lambda number: self._loading(self._gpus[number]))

    def _loading(self, gpu: Gpu) -> int:
        """0: no neighbour loads a model from the host; 1: a light one; 2: a heavy one."""
        worst = 0
        for neighbour in gpu.neighbours:
            for running in neighbour.leases.values():
                if running.copying_nbytes:
                    worst = max(worst, 2 if self._keeping.heavy(running.model) else 1)
        return worst


class MostResident(Placement):
    """The GPU with most of it: the least loading time by Tangram's Eq. 3 (its Algorithm 2)."""

    def choose(self, waiting: Waiting, free: set[int], now_s: float, may_wait: bool) -> int | None:
        resident = waiting.model.resident
        return max(free, key=lambda number: (resident.get(number, 0), -number))


class AnyGpu(Placement):
    """Any free GPU, unless one has the whole model: the baseline of Torpor §7.3 (Torpor-Random)."""

    from_peers = False

    def choose(self, waiting: Waiting, free: set[int], now_s: float, may_wait: bool) -> int | None:
        order = sorted(free)
        full = [number for number in order if waiting.model.resident.get(number, 0) >= waiting.model.nbytes]
        return self._rng.choice(full or order)


class Bound(Placement):
    """The GPU that has its model, for good: early binding. The first time it is the one with most memory that no model
    has, if that is enough: nothing ever makes room.
    """

    binds = True

    def choose(self, waiting: Waiting, free: set[int], now_s: float, may_wait: bool) -> int | None:
        model = waiting.model
        best, most = min((number for number, gpu in self._gpus.items() if gpu.leaves), default=None), -1
        for number, gpu in self._gpus.items():
            if gpu.leaves:
                continue
            there = model.resident.get(number, 0)
            if there >= model.nbytes:
                best, most = number, model.nbytes + gpu.capacity_nbytes
                if number in free:
                    break
            room = self._unbound(gpu)
            if room >= model.nbytes - there and room > most:
                best, most = number, room
        if best is None or best in free:
            return best
        waiting.held_for = best
        return None

    @staticmethod
    def _unbound(gpu: Gpu) -> int:
        """Bytes that no model has, nor the one that is running once it has all of its own. Neither of two ways to count
        overestimates them: the last reported free bytes may be taken by models on their way, and by instance, shared
        bytes count for each user.
        """
        if not gpu.leases:
            return gpu.stats.free_nbytes
        models = [running.model for running in gpu.leases.values()]
        coming = sum(model.nbytes - gpu.resident.get(model.instance, 0) for model in models)
        return max(gpu.stats.free_nbytes, gpu.capacity_nbytes - sum(gpu.resident.values())) - coming


PLACEMENT_CLASSES: Final[dict[str, type[Placement]]] = {
    "completion": Completion,
    "torpor": LeastInterference,
    "tangram": MostResident,
    "random": AnyGpu,
    "bound": Bound,
}
