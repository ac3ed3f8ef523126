"""Worth of models on a GPU: pure. Gives the numbers by which an executor evicts. `EVICTION_CLASSES` has the orders that
a policy may name.
"""

from abc import ABC, abstractmethod
from math import exp2, log2
from operator import attrgetter
from typing import ClassVar, Final

from dormouse.core.decisions.scheduling.functions import MIN
from dormouse.core.decisions.scheduling.state import Gpu, Model
from dormouse.core.decisions.scheduling.topology import Bandwidths

HEAVY: Final = 1.3
"""A model is heavy if waking it makes a request take so many times as long: Torpor's Table 4 underlines those above."""

MIN_TIME_S: Final = 1e-3
"""A deadline that even a resident model misses leaves this much: to keep it or not makes no difference by then."""

MIN_COST: Final = 1e-12
"""A cost of nothing still has a logarithm."""

REPLICA: Final = 2.0**-400
"""Worth of a model that another GPU has too, beside one that only this GPU has: at the default half life of rates as if
it had last been used 13 hours ago. Products and quotients stay within a float's limits.
"""

GIVEN_UP: Final = 200.0
"""Binary orders of magnitude by which models are worth less whose function is given up (rationing.py)."""

PINNED: Final = 2.0**20
"""Factor on the worth of a pinned byte: more than any other, also than one that many functions share. Small
beside the factor of tenants' quotas (core/decisions/memory/quotas.py): those count first.
"""

SPAN: Final = 240.0
"""Binary orders of magnitude between the worths on one GPU, where only their order is known: fewer than a quota takes
off, with the addition of a pin.
"""


_rank = attrgetter("rank")


class Keeping(ABC):
    """The order of one policy. ``models`` are the scheduler's."""

    rule: ClassVar[str]
    """The eviction order in a few words, for people."""

    def __init__(self, topology: Bandwidths, models: dict[str, Model]) -> None:
        self._topology = topology
        self._models = models
        for model in models.values():
            self.used(model)

    def used(self, model: Model) -> None:  # noqa: B027 (most orders need none)
        """Something that its rank depends on has changed."""

    def worth(self, gpu: Gpu, coming: Model | None = None) -> dict[str, float]:
        """Worth of a byte of each model on it, ascending: for a shared segment the worths add up there, and the least
        per byte goes first. The numbers mean something only beside each other. ``coming``: also of this one.
        """
        models = [self._models[name] for name in gpu.resident]
        if coming is not None and coming.instance not in gpu.resident:
            models.append(coming)
        return pinned_last(self.per_byte(models, gpu.number), models)

    @abstractmethod
    def per_byte(self, models: list[Model], gpu: int) -> dict[str, float]:
        """The same of these models, if they were on that GPU. Sorts them."""

    def heavy(self, model: Model) -> bool:
        """By measurement: whether a request mostly waits for its wake from the host."""
        function = model.function
        return function.predicted_s(model.nbytes / self._topology.host_bps) > HEAVY * function.best_s


def pinned_last(worth: dict[str, float], models: list[Model]) -> dict[str, float]:
    """Models of pinned functions go when nothing else is left: among themselves as they would."""
    pinned = {model.instance for model in models if model.function.pinned}
    if not pinned:
        return worth
    others = {name: each for name, each in worth.items() if name not in pinned}
    top = max(others.values(), default=1.0)
    kept = [name for name in worth if name in pinned]  # in their order; one is not used for long, and yet to be kept
    return others | {name: top * PINNED * (1.0 + place / len(kept)) for place, name in enumerate(kept)}


class ByUse(Keeping):
    """An order without a measure: numbers that ascend in it."""

    @abstractmethod
    def key(self, model: Model, gpu: int) -> tuple[bool, float]:
        """The least goes first."""

    def per_byte(self, models: list[Model], gpu: int) -> dict[str, float]:
        models.sort(key=lambda model: self.key(model, gpu))
        step = SPAN / len(models) if models else 0.0
        return {model.instance: 2.0 ** (place * step) for place, model in enumerate(models)}


class LeastRecentlyUsed(ByUse):
    """Least recently used first."""

    rule = "used longest ago"

    def key(self, model: Model, gpu: int) -> tuple[bool, float]:
        return (False, model.used_s)


class LightFirst(ByUse):
    """Light models and those that two GPUs have go before heavy ones, each by last use (Torpor §5.4)."""

    rule = "light or held twice, then used longest ago"

    def key(self, model: Model, gpu: int) -> tuple[bool, float]:
        return (self.heavy(model) and not model.elsewhere(gpu), model.used_s)


class Ranked(Keeping):
    """By `Model.rank`: the logarithm of the rate of use times the cost of a use without it."""

    def used(self, model: Model) -> None:
        function = model.function
        rate = function.log_rate - (log2(function.instances) if function.instances > 1 else 0.0)  # each has a part
        model.rank = rate + self.log_cost(model) - (GIVEN_UP if function.given_up else 0.0)

    @abstractmethod
    def log_cost(self, model: Model) -> float:
        """Of a use, for each of its bytes."""

    def per_byte(self, models: list[Model], gpu: int) -> dict[str, float]:
        models.sort(key=_rank)
        top = models[-1].rank if models else 0.0  # its worth is 1: a GPU weighs moves against evictions by it
        return {model.instance: exp2(model.rank - top) for model in models}


class ExposedTime(Ranked):
    """A use costs the part of the time to bring it back that a run would not hide, weighted by its share of the
    request's time; a model that another GPU has too goes first.
    """

    rule = "least exposed time x rate"

    def log_cost(self, model: Model) -> float:
        function = model.function
        copy_s = model.nbytes / self._topology.host_bps
        best_s = function.best_s
        exposed_s = MIN * copy_s
        if copy_s > best_s:
            exposed_s += copy_s - best_s
        time_s = function.deadline_s - best_s
        if time_s < MIN_TIME_S:
            time_s = MIN_TIME_S
        cost = function.sensitivity * exposed_s * exposed_s / time_s
        return log2((cost if cost > MIN_COST else MIN_COST) / (model.nbytes or 1))

    def per_byte(self, models: list[Model], gpu: int) -> dict[str, float]:
        worth = super().per_byte(models, gpu)
        twice = [model.instance for model in models if len(model.resident) > 1 and model.elsewhere(gpu)]
        return {name: worth.pop(name) * REPLICA for name in twice} | worth if twice else worth


class TimeToCopy(Ranked):
    """A use costs the time to bring it back (Tangram §3.2.2, Eq. 2)."""

    rule = "least time to copy x rate"

    def log_cost(self, model: Model) -> float:
        return log2(max(model.function.sensitivity, MIN_COST))


EVICTION_CLASSES: Final[dict[str, type[Keeping]]] = {
    "cost": ExposedTime,
    "lru": LeastRecentlyUsed,
    "torpor": LightFirst,
    "tangram": TimeToCopy,
}
