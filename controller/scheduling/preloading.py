"""What idle GPUs are given before anybody asks for it (ServerlessLoRA §4.1): pure.

A GPU on which nobody computes, while no request waits, is given the models that are likely to be asked for next, one
after the other. Which ones: what would be worth most there, if all could be chosen anew (filling.py). What a byte is
worth is what it is to evictions (keeping.py): the rate of requests seen, of which old ones count less, times the wait
that it saves. So nothing is predicted that has not been asked for, and what is brought in is not what goes first.

A model whose function adds to a base (an adapter) is two artefacts: its base, which is worth what it is to all who
share it, and its own bytes, which are of use only beside it. What makes a first token late besides is not chosen here:
a function's process is forked while it is deployed, and a language model's runtime is opened with its first preload.

It costs no request anything. The executor gives such copies up for the first wake there, and the controller has them
given up when a neighbour on the same switch begins to copy. Only what is worth less makes room: the executor sees to
that, for it alone knows who shares a segment. What it has refused is not tried again for a while.
"""

from collections.abc import Mapping
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
from dormouse.controller.scheduling.filling import Artefact, fill
from dormouse.controller.scheduling.functions import Function, LastPreload
from dormouse.controller.scheduling.inventory import Inventory
from dormouse.controller.scheduling.keeping import Keeping
from dormouse.controller.scheduling.placement import Placement
from dormouse.controller.scheduling.state import Gpu, Model
from dormouse.schemas.policy import Policy

REST_S: Final = 0.05
"""So long after a lease nothing is brought: the next request often comes at once."""

PLAN_S: Final = 1.0
"""Between two looks at what could be brought: a look at 500 functions takes milliseconds."""

REFUSED_S: Final = 30.0
"""What an executor had no room for is not tried again for so long."""

LEAST: Final = 0.01
"""Requests of lately that a function must have had, as its rate counts them: about seven half-lives after one."""

KEEP: Final = 1.25
"""What is there is worth so many times as much as what could take its place: copies are not for nothing."""

MOST_REFUSED: Final = 4096

INFINITY: Final = float("inf")


class Preloading:
    """``books`` are the scheduler's; ``keeping`` and ``placement`` are of the policy, which may change. ``due_s``: when
    it is to be looked.
    """

    keeping: Keeping
    placement: Placement

    def __init__(self, books: Inventory) -> None:
        self._books = books
        self._on = False
        self._looked_s = -INFINITY
        self._refused: dict[tuple[int, str], float] = {}  # by GPU and function: until when
        self.due_s = INFINITY

    def choose(self, policy: Policy, keeping: Keeping, placement: Placement) -> None:
        self._on = policy.preload and not placement.binds  # whose models never leave
        self.keeping, self.placement = keeping, placement
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
            self.due_s = max(now_s + REST_S, self._looked_s + PLAN_S)

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
        self._books.follow(gpu, event.resident, event.instance, now_s)
        if gpu.last_preload is not None:
            gpu.last_preload = gpu.last_preload._replace(outcome=event.outcome, copied_nbytes=event.copied_nbytes)
        if model is not None:
            counts = model.function.counts
            counts.preloads += event.copied_nbytes > 0
            counts.copied_nbytes += event.copied_nbytes
            if event.outcome == "refused":
                while len(self._refused) >= MOST_REFUSED:
                    del self._refused[next(iter(self._refused))]
                self._refused[gpu.number, model.function.name] = now_s + REFUSED_S
        if event.outcome == "there":
            self.due_s = now_s  # the next one

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
        model = self._wanted(gpu, now_s)
        if model is None:
            return False
        number, function = gpu.number, model.function
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

    # --- what to bring

    def _wanted(self, gpu: Gpu, now_s: float) -> Model | None:
        """The first of what would be worth most there that is not there."""
        number = gpu.number
        models = {}  # by function: of several instances, which are equal, one without a lease
        for model in self._books.models.values():
            if model.nbytes and (model.function.name not in models or not model.leased):
                models[model.function.name] = model
        mine = {name: model for name, model in models.items() if self._belongs(model, number, now_s)}
        artefacts, room_nbytes = self._artefacts(gpu, mine, models, now_s)
        for each in fill(artefacts, {"": room_nbytes}):
            model = models[each.key]
            if model.resident.get(number, 0) < model.nbytes and not model.leased:
                return model
        return None

    def _belongs(self, model: Model, number: int, now_s: float) -> bool:
        """Whether it may be held there: most of it is, or nowhere more; and it is likely to be asked for."""
        function, here = model.function, model.resident.get(number, 0)
        elsewhere = max([nbytes for gpu, nbytes in model.resident.items() if gpu != number], default=0)
        if elsewhere > here or (model.leased and not here):
            return False
        if function.given_up or self._refused.get((number, function.name), 0.0) > now_s:
            return here > 0
        coming = any(gpu.preload == model.instance for gpu in self._books.gpus.values())
        return here > 0 or (function.lately(now_s) >= LEAST and not coming)

    def _artefacts(
        self, gpu: Gpu, mine: Mapping[str, Model], models: Mapping[str, Model], now_s: float
    ) -> tuple[list[Artefact], int]:
        """Of the models that may be held there, and the room for them: what is free, or held by those without a lease.
        What a lease holds takes no room, and is there.
        """
        number = gpu.number
        worth = self.keeping.per_byte(list(mine.values()), number)
        pinned: set[str] = set()
        values: dict[str, float] = {}
        own: dict[str, int] = {}
        needs: dict[str, str] = {}
        for name, model in mine.items():
            base = self._base(model.function, models)
            own[name] = model.nbytes - (base.nbytes if base is not None else 0)
            byte = worth.get(model.instance, 0.0)
            values[name] = values.get(name, 0.0) + byte * own[name]
            if base is not None:
                key = needs[name] = base.function.name
                own.setdefault(key, base.nbytes)
                values[key] = values.get(key, 0.0) + byte * base.nbytes
            if model.leased:
                pinned.update((name, needs.get(name, name)))
        room_nbytes, artefacts = gpu.stats.free_nbytes - self._activations(gpu), []
        for name, nbytes in own.items():
            here = self._here(name, nbytes, number, models, needs)
            if name in pinned:
                nbytes = here = 0
            room_nbytes += here
            keep = 1.0 + (KEEP - 1.0) * here / nbytes if nbytes else 1.0
            artefacts.append(Artefact(name, "", nbytes, values[name] * keep, needs.get(name, "")))
        return artefacts, max(0, room_nbytes)

    def _here(self, name: str, nbytes: int, number: int, models: Mapping[str, Model], needs: Mapping[str, str]) -> int:
        """How much of an artefact is there: of an adapter what is beyond its base."""
        here = models[name].resident.get(number, 0)
        if name in needs:
            return max(0, here - (models[name].nbytes - nbytes))
        shared = [models[user].resident.get(number, 0) for user, base in needs.items() if base == name]
        return min(nbytes, max([here, *shared]))

    def _base(self, function: Function, models: Mapping[str, Model]) -> Model | None:
        base = models.get(function.base) if function.base else None
        return base if base is not None and base.nbytes < models[function.name].nbytes else None

    def _activations(self, gpu: Gpu) -> int:
        """What the next request there may want beside its model."""
        known = self._books.models
        return max([known[name].peak_nbytes for name in gpu.resident], default=0)
