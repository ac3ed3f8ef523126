"""What models on a GPU are worth keeping there: pure. Gives the order in which an executor may take their bytes.

``cost``: ARCHITECTURE 4.5: rate of use times the part of the time to bring it back that a run would not hide, weighted
by what that is of the time a request has; what another GPU has too goes first. ``lru``. ``torpor``: light models and
those that two GPUs have before heavy ones, each by last use (Torpor §5.4). ``tangram``: rate times the time to bring it
back (Tangram §3.2.2, Eq. 2).
"""

from collections.abc import Iterable
from math import log2
from operator import attrgetter
from typing import Final

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


class Keeping:
    """The order of one policy. ``models`` are the scheduler's."""

    def __init__(self, eviction: str, topology: Bandwidths, models: dict[str, Model]) -> None:
        self._eviction = eviction
        self._topology = topology
        self._models = models

    def follow(self, eviction: str) -> None:
        """Another order from now on."""
        self._eviction = eviction
        for model in self._models.values():
            self.used(model)

    def used(self, model: Model) -> None:
        """Something that its rank depends on has changed."""
        function = model.function
        rate = function.log_rate - (log2(function.instances) if function.instances > 1 else 0.0)  # each has a part
        if self._eviction == "tangram":
            model.rank = rate + log2(max(function.sensitivity, LEAST_COST))
            return
        copy_s = model.nbytes / self._topology.host_bps
        best_s = function.best_s
        exposed_s = LEAST * copy_s
        if copy_s > best_s:
            exposed_s += copy_s - best_s
        time_s = max(LEAST_TIME_S, function.deadline_s - best_s)
        cost = max(LEAST_COST, function.sensitivity * exposed_s * exposed_s / time_s)
        model.rank = rate + log2(cost / (model.nbytes or 1))

    def heavy(self, model: Model) -> bool:
        """By measurement: whether waking it from the host is what a request mostly waits for."""
        function = model.function
        return function.predicted_s(model.nbytes / self._topology.host_bps) > HEAVY * function.best_s

    def victims(self, gpu: Gpu) -> Iterable[Model]:
        """Models on this GPU, least worth first; not those that have a seat."""
        seated = {running.instance for running in gpu.leases.values()}
        models = [self._models[name] for name in gpu.resident if name not in seated]
        if self._eviction == "lru":
            models.sort(key=attrgetter("used_s"))
        elif self._eviction == "torpor":
            models.sort(key=lambda model: (self.heavy(model) and not model.elsewhere(gpu.number), model.used_s))
        else:
            models.sort(key=attrgetter("rank"))
            if self._eviction == "cost":
                number = gpu.number
                replicas = {
                    model.instance: model for model in models if len(model.resident) > 1 and model.elsewhere(number)
                }
                if replicas:
                    return [*replicas.values(), *(model for model in models if model.instance not in replicas)]
        return models

    def worth(self, gpu: Gpu) -> dict[str, float]:
        """The same as numbers: the executor evicts by worth per byte, summed over all that share a segment. They mean
        something only beside each other.
        """
        worth: dict[str, float] = {}
        if self._eviction in ("cost", "tangram"):
            models = [self._models[name] for name in gpu.resident]
            top = max((model.rank for model in models), default=0.0)
            for model in models:
                height = max(model.rank - top, -SPAN)
                if self._eviction == "cost" and model.elsewhere(gpu.number):
                    height -= SPAN + 1.0
                worth[model.instance] = 2.0**height
        else:
            for place, model in enumerate(self.victims(gpu)):
                worth[model.instance] = 2.0 ** (place * SPAN / len(gpu.resident))
        return worth
