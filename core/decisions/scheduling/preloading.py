"""Models for idle GPUs ahead of requests (ServerlessLoRA §4.1): pure.

A GPU on which no lease computes, while no request waits, is given the models that are likely to be asked for next, one
after the other: those that would be worth most there, if all could be chosen anew (holding.py). A byte is worth the
rate of requests seen, of which old ones count less, times the wait that it saves. So nothing is predicted that has not
been asked for.

A model whose function adds to a base (an adapter) is two artefacts: its base, worth the sum over all functions that
share it, and its own bytes, which are of use only beside it. Other causes of late first tokens are not handled here: a
function's process is forked while it is deployed, and a language model's runtime is opened with its first preload.

It costs no request anything. The executor gives such copies up for the first wake there, and the controller has them
given up when a neighbour on the same switch begins to copy. Only bytes of less worth make room: the executor ensures
that, for it alone knows the sharers of a segment. A refused model is not tried again for a while.
"""

from collections.abc import Generator
from math import inf
from typing import Final, TypeVar

from dormouse.core.decisions.scheduling.events import (
    Action,
    Asked,
    BringAsked,
    Event,
    FunctionKnown,
    InstanceKnown,
    InstanceLost,
    KeptAway,
    ModelSized,
    PreloadOn,
    PreloadOver,
    StepsTimed,
    StopPreloadOn,
    Tick,
    WakeOn,
)
from dormouse.core.decisions.scheduling.families import Families, per_byte
from dormouse.core.decisions.scheduling.filling import Slices
from dormouse.core.decisions.scheduling.functions import LastPreload
from dormouse.core.decisions.scheduling.holding import Holding
from dormouse.core.decisions.scheduling.inventory import Inventory
from dormouse.core.decisions.scheduling.keeping import pinned_last
from dormouse.core.decisions.scheduling.placement import Placement
from dormouse.core.decisions.scheduling.state import Gpu, Model
from dormouse.core.decisions.scheduling.topology import Bandwidths
from dormouse.schemas.policy import Policy

REST_S: Final = 0.05
"""So long after a lease nothing is brought: the next request often comes at once."""

PLAN_S: Final = 1.0
MANY: Final = 100
"""Between two looks at possible preloads, for up to so many models; for more of them, in proportion."""

SLICE: Final = 24
"""Of a look, with one Tick: some thirty microseconds."""

REFUSED_S: Final = 30.0
"""Time without another try after an executor had no room, or after a runtime was opened and is not there."""

MAX_REFUSED: Final = 4096

MAX_WISHED: Final = 64
"""Most functions whose models were wished for; the oldest wish is forgotten."""


Key = TypeVar("Key")


class Preloading:
    """``books`` and ``topology`` are the scheduler's; ``placement`` is of the policy, which may change. ``due_s``: when
    it is to be looked.
    """

    placement: Placement

    def __init__(self, books: Inventory, topology: Bandwidths) -> None:
        self._books, self._topology = books, topology
        self._families = Families(books.models, topology)
        self._on = False
        self._looked_s = self._now_s = -inf
        self._looking: Slices[None] | None = None
        self._found: tuple[Gpu, Model] | None = None  # the model that is to come, and its GPU
        self._plans: dict[int, tuple[Holding, Generator[int | Model, None, None]]] = {}  # by GPU: its next artefacts
        self._again: dict[int, None] = {}  # GPUs to which something has come, and for which there is room
        self._refused: dict[tuple[int, str], float] = {}  # by GPU and function: until when
        self._wished: dict[str, float] = {}  # by function: until when it is waited for
        self._opened: dict[tuple[int, str], float] = {}  # by GPU and runtime
        self.due_s = inf

    def choose(self, policy: Policy, placement: Placement) -> None:
        self._on = policy.preload and not placement.binds  # of a bound placement, models never leave
        self.placement = placement
        self.due_s, self._looking = inf, None
        self._plans.clear()
        if self._on:
            self._families.touch_all()

    # --- events

    def used(self, model: Model) -> None:
        """The statistics of its function's requests have changed."""
        if self._on:
            self._families.touch(model.instance)

    def follow(self, event: Event, now_s: float, waits: bool, actions: list[Action]) -> None:
        """After each event and its effects. ``waits``: some request does."""
        if self._wished:
            self._bring_wished(now_s, actions)
        if not self._on:
            return
        match event:
            case InstanceKnown() | InstanceLost() | ModelSized():
                self._families.touch(event.instance)
            case FunctionKnown():
                self._families.touch_function(event.function)
            case StepsTimed():
                for instance in event.instances:
                    self._families.touch(instance)
        for action in list(actions):
            if isinstance(action, WakeOn) and action.wake_nbytes:
                self._clear(self._books.gpus[action.lease.gpu], actions)
        if now_s >= self.due_s and isinstance(event, Tick):
            self._look(now_s, waits, actions)
        if not isinstance(event, Tick | Asked):
            self._stir(now_s)

    def wished(self, event: BringAsked | KeptAway) -> None:
        if isinstance(event, BringAsked):
            _until(self._wished, event.function, event.until_s, MAX_WISHED)
            return
        self._wished.pop(event.function, None)
        for number in self._books.gpus:
            _until(self._refused, (number, event.function), event.until_s)

    def _bring_wished(self, now_s: float, actions: list[Action]) -> None:
        """To GPUs on which no lease computes, with most of a model or most room; looked at again after each event, but
        no further than that while there is none. Of several instances, any: their models are the same.
        """
        for name in [name for name, until_s in self._wished.items() if until_s <= now_s]:
            del self._wished[name]
        gpus = self._books.gpus.values()
        idle = [gpu for gpu in gpus if self._idle(gpu, now_s)]
        for name in list(self._wished) if idle else ():
            models = self._books.models_of.get(name, {}).values()
            model = max(models, key=lambda each: (_most(each), each.instance), default=None)
            if model is None or _most(model) >= model.nbytes:
                del self._wished[name]
            elif not model.leased and not any(model.instance == gpu.preload for gpu in gpus):
                number = {gpu: (model.resident.get(gpu.number, 0), gpu.stats.free_nbytes, -gpu.number) for gpu in idle}
                self._begin(max(idle, key=lambda gpu: number[gpu]), model, now_s, actions)
                idle = [gpu for gpu in idle if self._idle(gpu, now_s)]
                if not idle:
                    return

    def _stir(self, now_s: float) -> None:
        """Something is over or has come: a GPU may be idle, and have room."""
        if self.due_s == inf:
            pause_s = PLAN_S * max(1.0, len(self._books.models) / MANY)
            self.due_s = max(now_s + REST_S, self._looked_s + pause_s)

    def _clear(self, waking: Gpu, actions: list[Action]) -> None:
        """Gives up other copies on this switch: copies for a lease have its links to themselves."""
        actions.extend([StopPreloadOn(gpu.number) for gpu in waking.neighbours if gpu.preload])

    def over(self, event: PreloadOver, now_s: float) -> None:
        """Its outcome, as reported by its executor."""
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
                _until(self._refused, (gpu.number, model.function.name), now_s + REFUSED_S)
            if event.outcome in ("refused", "failed"):
                self._wished.pop(model.function.name, None)
        if event.outcome != "there" or evicts:
            self._plans.pop(gpu.number, None)
        elif self._on:  # else it was a wish
            self._again[gpu.number] = None  # the next one has room, too
            self.due_s = now_s

    # --- looks

    def _look(self, now_s: float, waits: bool, actions: list[Action]) -> None:
        """Go on with a look, or begin one: at GPUs to which something has just come, or at all that are idle, those
        with most room first.
        """
        self.due_s, self._now_s = inf, now_s
        if self._looking is None and not self._begin_look(now_s, waits):
            return
        assert self._looking is not None
        done = 0
        for cost in self._looking:
            if self._found is not None:
                self._bring(*self._found, now_s, waits, actions)
                self._found = None
            done += cost
            if done >= SLICE:
                self.due_s = now_s  # after events sent meanwhile
                return
        self._looking = None
        if self._again:
            self.due_s = now_s

    def _begin_look(self, now_s: float, waits: bool) -> bool:
        """False: no GPU is idle, or it is too early."""
        again = [gpu for number in self._again if (gpu := self._books.gpus.get(number)) is not None]
        self._again.clear()
        idle = [] if waits else [gpu for gpu in again or self._books.gpus.values() if self._idle(gpu, now_s)]
        if not idle:
            return False
        if not again:
            self._looked_s = now_s
            self._plans.clear()
        self._looking = self._choosing(sorted(idle, key=lambda gpu: (-gpu.stats.free_nbytes, gpu.number)), now_s)
        return True

    def _choosing(self, idle: list[Gpu], now_s: float) -> Slices[None]:
        """Chooses the next model for each of them."""
        yield from self._families.settle()
        for gpu in idle:
            planned, chosen = self._plan(gpu, now_s)
            for each in chosen:
                if isinstance(each, int):
                    yield each
                elif planned.lacks(each):
                    self._found = gpu, each
                    yield 8
                    break
            else:
                self._plans.pop(gpu.number, None)

    def _plan(self, gpu: Gpu, now_s: float) -> tuple[Holding, Generator[int | Model, None, None]]:
        """That which has brought something there, or another one."""
        number, gpus = gpu.number, self._books.gpus
        known = self._plans.get(number)
        if known is None or known[0].gpu is not gpu:

            def refused(function: str) -> bool:
                return self._refused.get((number, function), 0.0) > self._now_s

            def opened(runtime: str) -> bool:
                return self._opened.get((number, runtime), 0.0) > self._now_s

            def coming(instance: str) -> bool:
                return any(instance == each.preload for each in gpus.values())

            planned = Holding(gpu, self._families, self._topology, coming, refused, opened)
            known = self._plans[number] = planned, planned.wanted(now_s)
        return known

    def _bring(self, gpu: Gpu, model: Model, now_s: float, waits: bool, actions: list[Action]) -> None:
        """Begins it, if nothing has changed since it was chosen."""
        known = self._books.gpus.get(gpu.number) is gpu and self._books.models.get(model.instance) is model
        if known and not waits and not model.leased and self._idle(gpu, now_s):
            self._begin(gpu, model, now_s, actions)
        else:
            self._plans.pop(gpu.number, None)
        self._stir(now_s)

    def worth(self, gpu: Gpu, coming: str) -> dict[str, float]:
        """Worth of a byte of each model there, and of the coming one, ascending: models of less worth make room for it;
        for a wished model, all but pinned ones do.
        """
        known = self._books.models
        models = [known[name] for name in sorted({*gpu.resident, coming}) if name in known]
        worth = [
            (
                inf
                if model.instance == coming and model.function.name in self._wished
                else per_byte(model, self._topology, self._looked_s),
                model.instance,
            )
            for model in models
        ]
        return pinned_last({instance: each for each, instance in sorted(worth)}, models)

    def _idle(self, gpu: Gpu, now_s: float) -> bool:
        """Whether no lease computes there, and nothing else comes over its switch."""
        copying = (running for each in gpu.neighbours for running in each.leases.values() if running.copying_nbytes)
        return not (
            gpu.preload
            or gpu.leaves
            or any(each.preload for each in gpu.neighbours)
            or any(not running.idle for running in gpu.turns)
            or any(running.copies_until_s > now_s for running in copying)
        )

    def _begin(self, gpu: Gpu, model: Model, now_s: float, actions: list[Action]) -> None:
        number, function = gpu.number, model.function
        nbytes = model.nbytes - model.resident.get(number, 0)
        copy_s, _, peer = self.placement.copy_s(model, number, now_s)
        saved_s = function.exposed_s(copy_s)
        if model.runtime and model.runtime not in gpu.runtimes:
            saved_s = max(saved_s, function.start_s)  # both at once
            _until(self._opened, (number, model.runtime), now_s + REFUSED_S)
        there = [other for other in model.resident if other != number] if self.placement.from_peers else []
        peers = tuple(sorted(there, key=lambda other: (other != peer, -model.resident[other], other)))
        gpu.preload = model.instance
        gpu.last_preload = LastPreload(now_s, function.name, nbytes, function.rate(now_s), saved_s)
        rate = gpu.last_preload.rate_s
        actions.append(PreloadOn(number, model.instance, model.version, peers, nbytes, rate, saved_s))


def _most(model: Model) -> int:
    """Of its bytes, on one GPU."""
    return max(model.resident.values(), default=0)


def _until(times_s: dict[Key, float], key: Key, until_s: float, most: int = MAX_REFUSED) -> None:
    """The oldest are forgotten for it, if they are too many."""
    times_s.pop(key, None)
    while len(times_s) >= most:
        del times_s[next(iter(times_s))]
    times_s[key] = until_s
