"""Instances of one simulated language model, each with a runtime of its own: the choice of the instance for a request,
and the need for one more, as decisions/requests/queueing.py and replicas.py have it. Pure. extras.py starts and ends
them.

They are of a function, or of a group whose functions have one runtime: then each stands for one of every function.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.leases import SimulatedLease
from dormouse.controller.simulator.streams.model import LlmSpec
from dormouse.controller.simulator.streams.stream import Stream
from dormouse.core.decisions.rules.replicas import BEGUN, beyond_share, mean, wait_for_others


class SimulatedInstance:
    """``open`` requests by number; ``queue`` are beyond the ``most`` that it has at once, and those of all instances
    of its ``replicas``, if it has others beside it. ``asked``: for a lease, or it has one; ``begun``: an answer, since
    it has that. It stands for all instances of a group that has one runtime. ``idle_s``: since when it has
    no request.
    """

    __slots__ = ("asked", "begun", "idle_s", "lease", "most", "name", "open", "queue", "replicas", "spec")

    def __init__(self, name: str, spec: LlmSpec) -> None:
        self.name, self.spec = name, spec
        self.most = 0
        self.open: dict[int, Stream] = {}
        self.queue: deque[int] = deque()
        self.asked = self.begun = False
        self.lease: SimulatedLease | None = None
        self.replicas: StreamReplicas | None = None
        self.idle_s = 0.0


class HoldsInstances(Protocol):
    """The owner of the instances: serving.py."""

    def added(self, instance: SimulatedInstance) -> None:
        """It serves."""

    def removed(self, instance: SimulatedInstance) -> None:
        """It ends."""


class StreamReplicas:
    """``serving`` instances, the first one first. ``due_s`` says when a request is to have its first token; BEGUN: it
    has. ``tpot_s`` is wanted by function.
    """

    def __init__(
        self,
        names: Sequence[str],
        spec: ModelSpec,
        first: SimulatedInstance,
        tpot_s: dict[int, float],
        due_s: Callable[[int], float],
        instances: HoldsInstances,
    ) -> None:
        self.names, self.spec = names, spec
        self.serving = [first]
        self.loading = 0
        self._wanted_s, self._due_s, self._instances = tpot_s, due_s, instances
        self._tpot_s: dict[int, float] = {}  # recent, of answers, by function

    @property
    def fewest(self) -> SimulatedInstance:
        """It gets the next request."""
        return min(self.serving, key=_open)

    def answered(self, function: int, tpot_s: float) -> None:
        """A token after the first took so long, in the mean."""
        self._tpot_s[function] = mean(self._tpot_s.get(function), tpot_s)

    def excess(self) -> list[tuple[SimulatedInstance, int]]:
        """Requests that are to go to a new instance, and their holders."""
        waiting = [[request for request in each.open if self._due_s(request) < BEGUN] for each in self.serving]
        moves = beyond_share([(len(each.open), own) for each, own in zip(self.serving, waiting, strict=True)])
        return [(each, request) for each, requests in zip(self.serving, moves, strict=True) for request in requests]

    # --- what extras.py asks

    def waits(self, now_s: float) -> bool:
        return bool(self.serving[0].queue) or self._late(now_s)

    def called_for(self, now_s: float) -> bool:
        return not self.loading and all(each.begun for each in self.serving) and self._late(now_s)

    def _late(self, now_s: float) -> bool:
        slow = any(tpot_s > self._wanted_s[function] for function, tpot_s in self._tpot_s.items())
        return any(
            wait_for_others([self._due_s(request) for request in each.open], slow, now_s) for each in self.serving
        )

    def starts(self) -> None:
        self._tpot_s.clear()  # of fewer instances

    def serves(self, name: str) -> None:
        first = self.serving[0]
        instance = SimulatedInstance(name, first.spec)
        instance.most, instance.queue, instance.replicas = first.most, first.queue, self
        self.serving.append(instance)
        self._instances.added(instance)

    def idle_since_s(self, name: str) -> float | None:
        instance = self._of(name)
        seated = instance.lease is not None and instance.lease.seat is not None
        return None if instance.open or (instance.asked and not seated) else instance.idle_s

    def ends(self, name: str) -> None:
        instance = self._of(name)
        self.serving.remove(instance)
        self._instances.removed(instance)

    def _of(self, name: str) -> SimulatedInstance:
        return next(each for each in self.serving if each.name == name)


def _open(instance: SimulatedInstance) -> int:
    return len(instance.open)
