"""What models on a GPU are worth keeping there: pure. Gives the order in which an executor may take their bytes.
`EVICTION_CLASSES` has the orders that a policy may name.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import log2
from operator import attrgetter
from typing import ClassVar, Final

from dormouse.controller.state import Gpu, Model
from dormouse.controller.topology import Bandwidths

HEAVY: Final = 1.3
"""A model is heavy if waking it makes a request take so many times as long: Torpor's Table 4 underlines those above."""

LEAST: Final = 0.05
"""Share of a copy that always counts, though a run would hide it: the link is not its own."""

LEAST_TIME_S: Final = 1e-3
"""A deadline that even a resident model misses leaves this much: to keep it or not makes no difference by then."""

LEAST_COST: Final = 1e-12
"""A cost of nothing still has a logarithm."""

SPAN: Final = 400.0
"""Binary orders of magnitude between the worths on one GPU, and below them for replicas: 13 hours at the default half
life; products and quotients stay within a float's limits.
"""


class Keeping(ABC):
    """The order of one policy. ``models`` are the scheduler's."""

    rule: ClassVar[str]
    """Who goes first, in a few words for people."""

    whole: ClassVar = False
    """Whether a model goes as a whole, or as many of its bytes as are needed."""

    def __init__(self, topology: Bandwidths, models: dict[str, Model]) -> None:
        self._topology = topology
        self._models = models
        for model in models.values():
            self.used(model)

    def used(self, model: Model) -> None:  # noqa: B027 (most orders need none)
        """Something that its rank depends on has changed."""

    @abstractmethod
    def order(self, models: list[Model], gpu: int) -> list[Model]:
        """These on a GPU, least worth first."""

    def heavy(self, model: Model) -> bool:
        """By measurement: whether waking it from the host is what a request mostly waits for."""
        function = model.function
        return function.predicted_s(model.nbytes / self._topology.host_bps) > HEAVY * function.best_s

    def victims(self, gpu: Gpu) -> Iterable[Model]:
        """Models on this GPU, least worth first; not those that have a seat."""
        seated = {running.instance for running in gpu.leases.values()}
        return self.order([self._models[name] for name in gpu.resident if name not in seated], gpu.number)

    def worth(self, gpu: Gpu) -> dict[str, float]:
        """What all on it are worth, as numbers: the executor evicts by worth per byte, summed over all that share a
        segment. They mean something only beside each other.
        """
        models = self.order([self._models[name] for name in gpu.resident], gpu.number)
        return {model.instance: 2.0 ** (place * SPAN / len(models)) for place, model in enumerate(models)}


class LeastRecentlyUsed(Keeping):
    """What was used longest ago goes first."""

    rule = "used longest ago"
    whole = True

    def order(self, models: list[Model], gpu: int) -> list[Model]:
        return sorted(models, key=attrgetter("used_s"))


class LightFirst(Keeping):
    """Light models and those that two GPUs have go before heavy ones, each by last use (Torpor §5.4)."""

    rule = "light or held twice, then used longest ago"
    whole = True

    def order(self, models: list[Model], gpu: int) -> list[Model]:
        return sorted(models, key=lambda model: (self.heavy(model) and not model.elsewhere(gpu), model.used_s))


class Ranked(Keeping):
    """By `Model.rank`: the logarithm of the rate of use times what a use would cost without it."""

    def used(self, model: Model) -> None:
        function = model.function
        rate = function.log_rate - (log2(function.instances) if function.instances > 1 else 0.0)  # each has a part
        model.rank = rate + self.log_cost(model)

    @abstractmethod
    def log_cost(self, model: Model) -> float:
        """Of a use, for each of its bytes."""

    def order(self, models: list[Model], gpu: int) -> list[Model]:
        models.sort(key=attrgetter("rank"))
        return models

    def worth(self, gpu: Gpu) -> dict[str, float]:
        models = [self._models[name] for name in gpu.resident]
        top = max((model.rank for model in models), default=0.0)
        return {model.instance: 2.0 ** self.height(model, max(model.rank - top, -SPAN), gpu.number) for model in models}

    def height(self, model: Model, height: float, gpu: int) -> float:
        """Its worth's logarithm there; ``height`` is that by its rank, from -SPAN to 0."""
        return height


class ExposedTime(Ranked):
    """A use costs the part of the time to bring it back that a run would not hide, weighted by what that is of the time
    a request has; what another GPU has too goes first.
    """

    rule = "least exposed time x rate"

    def log_cost(self, model: Model) -> float:
        function = model.function
        copy_s = model.nbytes / self._topology.host_bps
        best_s = function.best_s
        exposed_s = LEAST * copy_s
        if copy_s > best_s:
            exposed_s += copy_s - best_s
        time_s = max(LEAST_TIME_S, function.deadline_s - best_s)
        cost = max(LEAST_COST, function.sensitivity * exposed_s * exposed_s / time_s)
        return log2(cost / (model.nbytes or 1))

    def order(self, models: list[Model], gpu: int) -> list[Model]:
        models.sort(key=attrgetter("rank"))
        replicas = {model.instance: model for model in models if len(model.resident) > 1 and model.elsewhere(gpu)}
        if not replicas:
            return models
        return [*replicas.values(), *(model for model in models if model.instance not in replicas)]

    def height(self, model: Model, height: float, gpu: int) -> float:
        return height - SPAN - 1.0 if model.elsewhere(gpu) else height


class TimeToCopy(Ranked):
    """A use costs the time to bring it back (Tangram §3.2.2, Eq. 2)."""

    rule = "least time to copy x rate"

    def log_cost(self, model: Model) -> float:
        return log2(max(model.function.sensitivity, LEAST_COST))


EVICTION_CLASSES: Final[dict[str, type[Keeping]]] = {
    "cost": ExposedTime,
    "lru": LeastRecentlyUsed,
    "torpor": LightFirst,
    "tangram": TimeToCopy,
}
