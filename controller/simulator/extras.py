"""Instances of simulated functions that come and go while requests do: pure. It has the place of
decisions/requests/replicas.py, which states the rules, and decides by the same code (rules/replicas.py). Only those
with batches and language models have such instances; those of others are all there from the beginning (instances.py).

    starts ──load_s──► serves ──EXTRA_IDLE_S without a request──► ends

The scheduling core receives the events of a real node: the instance when it starts, its model when that is loaded,
the bytes of that on each GPU, and its end.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

from dormouse.controller.simulator.agenda import LOADED, SPARE, Agenda
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.executors import Executors
from dormouse.core.config import LimitsSection
from dormouse.core.decisions.memory.models import KnownModels
from dormouse.core.decisions.rules.replicas import has_room
from dormouse.core.decisions.scheduling import events as ev

LIMITS: Final = LimitsSection()
"""As a node has them by default."""

EXTRA_IDLE_S: Final = LIMITS.extra_idle_ms / 1000


class Replicated(Protocol):
    """A function, or a group of functions with one runtime: ``names`` are those that its instances may have, that of
    the first one first, ``loading`` of them load.
    """

    names: Sequence[str]
    spec: ModelSpec
    loading: int

    def waits(self, now_s: float) -> bool:
        """Whether requests do, for others of the same instance."""

    def called_for(self, now_s: float) -> bool:
        """Whether one more instance would help them."""

    def starts(self) -> None:
        """One does."""

    def serves(self, name: str) -> None:
        """One has loaded."""

    def idle_since_s(self, name: str) -> float | None:
        """None: it has something to do."""

    def ends(self, name: str) -> None:
        """Its lease, too."""


class Extras:
    """Those of one node. ``resting``: the instances that have a lease and no request; it takes no GPU from others."""

    def __init__(
        self, executors: Executors, known: KnownModels, agenda: Agenda, tell: Callable[[ev.Event], None]
    ) -> None:
        self._executors, self._known, self._agenda, self._tell = executors, known, agenda, tell
        self.crowded: dict[Replicated, None] = {}
        self._up: dict[str, Replicated] = {}  # by name of an extra instance
        self._loading: set[str] = set()
        self.resting: Callable[[], Collection[str]] = lambda: ()

    def look(self) -> None:
        """Start the instances that are called for."""
        now_s = self._agenda.now_s
        for function in list(self.crowded):
            if not function.waits(now_s):
                del self.crowded[function]
            elif self._allowed(function) and function.called_for(now_s) and self._room():
                self._start(function)

    def _allowed(self, function: Replicated) -> bool:
        return any(name not in self._up for name in function.names[1:])

    def _room(self) -> bool:
        """Whether the node has room for one more, and a GPU that nobody else wants."""
        core = self._executors.core
        wanted = {running.instance for gpu in core.gpus.values() for running in gpu.leases.values()}
        wanted.update(waiting.model.instance for waiting in core.waiting.values())
        return has_room(
            extras=len(self._up),
            most=LIMITS.extra_instances,
            loading=len(self._loading),
            loads=LIMITS.loads,
            coming=len(self._loading),
            wanted=len(wanted.difference(self.resting())),
            gpus=len(core.gpus),
        )

    def _start(self, function: Replicated) -> None:
        name = next(each for each in function.names[1:] if each not in self._up)
        self._up[name] = function
        self._loading.add(name)
        function.loading += 1
        function.starts()
        spec, first = function.spec, function.names[0]
        self._known.learn(name, self._known.by_instance[first])
        self._tell(ev.InstanceKnown(name, first, spec.tenant, "" if spec.llm is None else name))
        self._agenda.put(self._agenda.now_s + spec.load_s, LOADED, name)

    def due(self, kind: int, name: str) -> None:
        if kind == LOADED:
            self._loaded(name)
        elif (function := self._up.get(name)) is not None and name not in self._loading:
            since_s = function.idle_since_s(name)
            if since_s is not None and since_s + EXTRA_IDLE_S <= self._agenda.now_s:
                self._end(function, name)

    def _loaded(self, name: str) -> None:
        """It finds on GPUs what the first one has there."""
        function = self._up[name]
        self._loading.discard(name)
        function.loading -= 1
        self._tell(ev.ModelSized(name, 1, function.spec.nbytes))
        for gpu in self._executors.gpus:
            if nbytes := gpu.residency.resident_nbytes(name):
                self._tell(ev.Evicted(gpu.number, gpu.epoch, ((name, nbytes),), gpu.stats))
        function.serves(name)
        self.idles(name)

    def idles(self, name: str) -> None:
        """It may end, if it has nothing to do until then."""
        if name in self._up:
            self._agenda.put(self._agenda.now_s + EXTRA_IDLE_S, SPARE, name)

    def _end(self, function: Replicated, name: str) -> None:
        function.ends(name)
        del self._up[name]
        self._tell(ev.InstanceLost(name))
        self._known.forget(name)
        if (llm := function.spec.llm) is not None and llm.adapter_nbytes and not llm.group:
            self._executors.end_runtime(name)
