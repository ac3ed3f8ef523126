"""Functions in the order of their models' worth per byte before any request, kept up to date: pure.

A byte of a model is worth the rate of its function's requests times the wait that each would have for the model's copy,
divided by the model's bytes (ServerlessLoRA's v). Its worth to evictions (keeping.py) is another, which depends on how
much of their deadlines requests have left: by that, most waits are as good as none.

All rates decay alike, so the order changes only with functions' events. It is of *families*: a base with all models
that add to it is one, for a byte of the base is worth something to all of them.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import log2
from typing import Final

from dormouse.core.decisions.scheduling.filling import Slices
from dormouse.core.decisions.scheduling.functions import Function
from dormouse.core.decisions.scheduling.state import Model
from dormouse.core.decisions.scheduling.topology import Bandwidths

NOTHING: Final = float("-inf")

MAX: Final = 1 << 62
"""More bytes than anything has."""


def per_second(function: Function, now_s: float) -> float:
    """Requests to each of its instances, by how much a wait of theirs counts."""
    return function.sensitivity * function.lately(now_s) / (function.instances or 1) / function.half_life_s


def per_byte(model: Model, topology: Bandwidths, now_s: float) -> float:
    """Seconds of waiting per second and byte."""
    function, nbytes = model.function, model.nbytes or 1
    return per_second(function, now_s) * function.exposed_s(nbytes / topology.host_bps) / nbytes


def _log_per_byte(model: Model, topology: Bandwidths) -> float:
    """The same as a logarithm, without the term that is the same for all models at any time."""
    function, nbytes = model.function, model.nbytes or 1
    of_request = function.sensitivity * function.exposed_s(nbytes / topology.host_bps)
    if of_request <= 0.0 or not function.asked:
        return NOTHING
    return function.log_rate + log2(of_request / (function.half_life_s * nbytes * (function.instances or 1)))


class ModelFamily:
    """``bound``: no byte of it is worth more, as `_log_per_byte`. ``least_nbytes``: nothing of it comes in less."""

    __slots__ = ("_half_life_s", "_rates", "_worths", "bound", "functions", "least_nbytes", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.functions: dict[str, dict[str, Model]] = {}  # by name, by instance
        self._worths: dict[str, float] = {}  # by name of function, as logarithms
        self._rates: dict[str, float] = {}
        self._half_life_s = 1.0
        self.bound = NOTHING
        self.least_nbytes = MAX

    def of(self, function: str) -> Model | None:
        """One without a lease, if there is one: all have the same model."""
        found = None
        if (models := self.functions.get(function)) is not None:
            for model in models.values():
                if not model.leased:
                    return model
                found = model
        return found

    @property
    def only(self) -> Model | None:
        """Its model, if it is of one function."""
        return self.of(next(iter(self.functions))) if len(self.functions) == 1 else None

    def models(self) -> Iterator[Model]:
        """One of each function."""
        for name in self.functions:
            if (model := self.of(name)) is not None:
                yield model

    def changed(self, function: str, topology: Bandwidths) -> None:
        model = self.of(function)
        if model is None:
            self._worths.pop(function, None)
            self._rates.pop(function, None)
        else:
            self._worths[function] = _log_per_byte(model, topology)
            self._rates[function] = model.function.log_rate
            self._half_life_s = model.function.half_life_s
            self.least_nbytes = min(self.least_nbytes, _least_nbytes(model))
        self.bound = max(self._worths.values(), default=NOTHING)
        if len(self._worths) > 1:  # a base is worth no more than if it were worth so much to all
            self.bound += log2(len(self._worths))

    def lately(self, now_s: float) -> float:
        """Requests of the function that has had most."""
        most: float = 2.0 ** (max(self._rates.values()) - now_s / self._half_life_s)
        return most

    def most_per_byte(self, now_s: float) -> float:
        most: float = 2.0 ** (self.bound - now_s / self._half_life_s)
        return most


def _least_nbytes(model: Model) -> int:
    function = model.function
    if model.runtime:
        return 0  # its process may be the missing part
    return function.base_nbytes or model.nbytes if function.base else model.nbytes


class Families:
    """All functions with a model. ``models`` are the scheduler's. ``order`` has those that were asked for, the highest
    worth first.
    """

    def __init__(self, models: dict[str, Model], topology: Bandwidths) -> None:
        self._models, self._topology = models, topology
        self._touched: dict[str, None] = {}
        self._of: dict[str, tuple[str, str]] = {}  # family and function by instance
        self._family: dict[str, str] = {}  # by function
        self.by_name: dict[str, ModelFamily] = {}
        self.order: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Number of functions."""
        return len(self._family)

    def touch(self, instance: str) -> None:
        """Something that its worth depends on has changed, or it is new, or gone."""
        self._touched[instance] = None

    def touch_all(self) -> None:
        self._touched.update(dict.fromkeys([*self._of, *self._models]))

    def touch_function(self, name: str) -> None:
        if (family := self.by_name.get(self._family.get(name, ""))) is not None:
            self._touched.update(dict.fromkeys(family.functions[name]))

    def model(self, instance: str) -> Model | None:
        return self._models.get(instance)

    def of(self, instance: str) -> ModelFamily | None:
        family, _ = self._of.get(instance, ("", ""))
        return self.by_name.get(family)

    def settle(self) -> Slices[None]:
        """Bring the order up to date."""
        while self._touched:
            instance, _ = self._touched.popitem()
            before, now = self._of.get(instance), self._place(instance)
            if before is not None and before != now:
                self._leave(instance, *before)
            if now is not None:
                self._join(instance, *now)
            yield 4

    def _place(self, instance: str) -> tuple[str, str] | None:
        model = self._models.get(instance)
        if model is None or not model.nbytes or not model.function.name:
            return None
        function: Function = model.function
        return function.base or function.name, function.name

    def _leave(self, instance: str, name: str, function: str) -> None:
        del self._of[instance]
        family = self.by_name[name]
        del family.functions[function][instance]
        if not family.functions[function]:
            del family.functions[function]
            if self._family.get(function) == name:
                del self._family[function]
        self._changed(family, function)
        if not family.functions:
            del self.by_name[name]

    def _join(self, instance: str, name: str, function: str) -> None:
        self._of[instance] = name, function
        self._family[function] = name
        family = self.by_name.setdefault(name, ModelFamily(name))
        family.functions.setdefault(function, {})[instance] = self._models[instance]
        self._changed(family, function)

    def _changed(self, family: ModelFamily, function: str) -> None:
        before = -family.bound, family.name
        family.changed(function, self._topology)
        after = -family.bound, family.name
        if before != after:
            if before[0] != -NOTHING:
                del self.order[bisect_left(self.order, before)]
            if after[0] != -NOTHING:
                insort(self.order, after)
