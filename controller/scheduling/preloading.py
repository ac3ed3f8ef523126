"""What idle GPUs are given before anybody asks for it (ServerlessLoRA §4.1): pure.

A GPU on which nobody computes, while no request waits, is given the models that are likely to be asked for next, one
after the other. Which ones: what would be worth most there, if all could be chosen anew (holding.py). A byte is
worth the rate of requests seen, of which old ones count less, times the wait that it saves. So nothing is predicted
that has not been asked for.

A model whose function adds to a base (an adapter) is two artefacts: its base, which is worth what it is to all who
share it, and its own bytes, which are of use only beside it. What makes a first token late besides is not chosen here:
a function's process is forked while it is deployed, and a language model's runtime is opened with its first preload.

It costs no request anything. The executor gives such copies up for the first wake there, and the controller has them
given up when a neighbour on the same switch begins to copy. Only what is worth less makes room: the executor sees to
that, for it alone knows who shares a segment. What it has refused is not tried again for a while.
"""

from typing import Final

from dormouse.controller.scheduling.events import (
    Action,
    Asked,
    Event,
    PreloadOn,
    PreloadOver,
    StopPreloadOn,
    Tick,
    WakeOn,
)
from dormouse.controller.scheduling.functions import LastPreload
from dormouse.controller.scheduling.holding import per_byte, wanted
from dormouse.controller.scheduling.inventory import Inventory
from dormouse.controller.scheduling.placement import Placement
from dormouse.controller.scheduling.state import Gpu, Model
from dormouse.controller.scheduling.topology import Bandwidths
from dormouse.schemas.policy import Policy

REST_S: Final = 0.05
"""So long after a lease nothing is brought: the next request often comes at once."""

PLAN_S: Final = 1.0
MANY: Final = 100
"""Between two looks at what could be brought, for up to so many models; for more of them, in proportion: a look at
500 takes five milliseconds.
"""

REFUSED_S: Final = 30.0
"""What an executor had no room for is not tried again for so long."""

MOST_REFUSED: Final = 4096

INFINITY: Final = float("inf")


class Preloading:
    """``books`` and ``topology`` are the scheduler's; ``placement`` is of the policy, which may change. ``due_s``: when
    it is to be looked.
    """

    placement: Placement

    def __init__(self, books: Inventory, topology: Bandwidths) -> None:
        self._books, self._topology = books, topology
        self._on = False
        self._looked_s = -INFINITY
        self._refused: dict[tuple[int, str], float] = {}  # by GPU and function: until when
        self.due_s = INFINITY

    def choose(self, policy: Policy, placement: Placement) -> None:
        self._on = policy.preload and not placement.binds  # whose models never leave
        self.placement = placement
        self.due_s = INFINITY

    def follow(self, event: Event, now_s: float, waits: bool, actions: list[Action]) -> None:
        """After each event, and what it led to. ``waits``: some request does."""
        if not self._on:
            return
        for action in list(actions):
            if isinstance(action, WakeOn) and action.wake_nbytes:
                self._clear(self._books.gpus[action.lease.gpu], actions)
        if now_s >= self.due_s:
            self._look(now_s, waits, actions)
        if not isinstance(event, Tick | Asked):
            self._stir(now_s)

    def _stir(self, now_s: float) -> None:
        """Something is over or has come: a GPU may be idle, and have room."""
        if self.due_s == INFINITY:
            pause_s = PLAN_S * max(1.0, len(self._books.models) / MANY)
            self.due_s = max(now_s + REST_S, self._looked_s + pause_s)

    def _clear(self, waking: Gpu, actions: list[Action]) -> None:
        """What copies for a lease there has the links of its switch to itself."""
        actions.extend([StopPreloadOn(gpu.number) for gpu in waking.neighbours if gpu.preload])

    def over(self, event: PreloadOver, now_s: float) -> None:
        """What came of it, as its executor says."""
        gpu = self._books.gpus.get(event.gpu)
        if gpu is None or gpu.epoch != event.epoch:
            return
        gpu.preload, gpu.stats = "", event.stats
        model = self._books.models.get(event.instance)
        evicts = any(nbytes < gpu.resident.get(name, 0) for name, nbytes in event.resident)
        self._books.follow(gpu, event.resident, event.instance, now_s, "preload")
        if gpu.last_preload is not None:
            gpu.last_preload = gpu.last_preload._replace(outcome=event.outcome, copied_nbytes=event.copied_nbytes)
        if model is not None:
            counts = model.function.counts
            counts.preloads += event.copied_nbytes > 0
            counts.copied_nbytes += event.copied_nbytes
            counts.preloaded_nbytes += event.copied_nbytes
            if event.outcome == "refused":
                while len(self._refused) >= MOST_REFUSED:
                    del self._refused[next(iter(self._refused))]
                self._refused[gpu.number, model.function.name] = now_s + REFUSED_S
        if event.outcome == "there" and not evicts:
            self.due_s = now_s  # the next one has room, too

    def _look(self, now_s: float, waits: bool, actions: list[Action]) -> None:
        """Have something brought to the idle GPU with most room, if there is one, and anything is worth it."""
        self.due_s = INFINITY
        idle = [] if waits else [gpu for gpu in self._books.gpus.values() if self._idle(gpu, now_s)]
        if not idle:
            return
        self._looked_s = now_s
        for gpu in sorted(idle, key=lambda gpu: (-gpu.stats.free_nbytes, gpu.number)):
            if self._begin(gpu, now_s, actions):
                self._stir(now_s)  # others may be idle, too
                return

    def worth(self, gpu: Gpu, coming: str) -> dict[str, float]:
        """Of a byte of each model there, and of what comes, ascending: what is worth less makes room for it."""
        known = self._books.models
        models = [known[name] for name in sorted({*gpu.resident, coming}) if name in known]
        worth = per_byte(models, self._topology, self._looked_s)
        return dict(sorted(worth.items(), key=lambda each: each[1]))

    def _idle(self, gpu: Gpu, now_s: float) -> bool:
        """Nobody computes there, nor copies over its switch."""
        copying = (running for each in gpu.neighbours for running in each.leases.values() if running.copying_nbytes)
        return not (
            gpu.preload
            or gpu.leaves
            or any(not running.idle for running in gpu.turns)
            or any(running.copies_until_s > now_s for running in copying)
        )

    def _begin(self, gpu: Gpu, now_s: float, actions: list[Action]) -> bool:
        number, books = gpu.number, self._books
        coming = {each.preload for each in books.gpus.values() if each.preload}

        def refused(function: str) -> bool:
            return self._refused.get((number, function), 0.0) > now_s

        def comes(model: Model) -> bool:
            return model.instance in coming

        model = wanted(gpu, books.models.values(), self._topology, now_s, comes, refused)
        if model is None:
            return False
        function = model.function
        nbytes = model.nbytes - model.resident.get(number, 0)
        copy_s, _, peer = self.placement.copy_s(model, number, now_s)
        saved_s = function.exposed_s(copy_s)
        there = [other for other in model.resident if other != number] if self.placement.from_peers else []
        peers = tuple(sorted(there, key=lambda other: (other != peer, -model.resident[other], other)))
        gpu.preload = model.instance
        gpu.last_preload = LastPreload(now_s, function.name, nbytes, function.rate(now_s), saved_s)
        rate = gpu.last_preload.rate_s
        actions.append(PreloadOn(number, model.instance, model.version, peers, nbytes, rate, saved_s))
        return True
