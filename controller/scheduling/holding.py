"""Which model a GPU is to be given next: the first of what would be worth most there that is not there. Pure.

A byte of a model is worth the rate of its function's requests times the wait that each would have for the model's copy,
for each of its bytes (ServerlessLoRA's v). That is not what it is worth to evictions (keeping.py), which look at how
much of their deadlines requests have left: by that, most waits are as good as none. What fits is filling.py's. A model
whose function adds to a base is two artefacts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from dormouse.controller.scheduling.filling import FEW, Artefact, fill
from dormouse.controller.scheduling.functions import Function
from dormouse.controller.scheduling.state import Gpu, Model
from dormouse.controller.scheduling.topology import Bandwidths

LEAST: Final = 0.01
"""Requests of lately that a function must have had, as its rate counts them: about seven half-lives after one."""

KEEP: Final = 4.0
"""What is there is worth so many times as much as what could take its place: copies are not for nothing."""


class _ModelPart:
    """A base, or all of a model beyond its base. ``models`` have it; ``value`` is what it is worth to all of them."""

    __slots__ = ("beyond_nbytes", "models", "nbytes", "needs", "value")

    def __init__(self, nbytes: int, beyond_nbytes: int, needs: str) -> None:
        self.nbytes, self.beyond_nbytes, self.needs = nbytes, beyond_nbytes, needs
        self.models: list[Model] = []
        self.value = 0.0

    def here(self, gpu: int) -> int:
        """Bytes of it that are there."""
        most = max([model.resident.get(gpu, 0) for model in self.models])
        return min(self.nbytes, max(0, most - self.beyond_nbytes))


def per_byte(models: Iterable[Model], topology: Bandwidths, now_s: float) -> dict[str, float]:
    """What a byte of each of these is worth, by instance: seconds of waiting per second and byte."""
    found = {}
    for model in models:
        function, nbytes = model.function, max(1, model.nbytes)
        requests = function.lately(now_s) / max(1, function.instances)  # each has a part
        saved_s = function.exposed_s(nbytes / topology.host_bps)
        found[model.instance] = function.sensitivity * requests * saved_s / function.half_life_s / nbytes
    return found


def wanted(
    gpu: Gpu,
    models: Iterable[Model],
    topology: Bandwidths,
    now_s: float,
    comes: Callable[[Model], bool],
    refused: Callable[[str], bool],
) -> Model | None:
    """None: all of that is there.

    Args:
        comes: whether a model is on its way to some GPU without a lease.
        refused: whether the GPU's executor had no room for this function's.
    """
    number = gpu.number
    of: dict[str, Model] = {}  # by function: of several instances, which are equal, one without a lease
    for model in models:
        if model.nbytes and (model.function.name not in of or not model.leased):
            of[model.function.name] = model
    mine = [model for model in of.values() if _may_be_held(model, number, comes, refused)]
    worth = per_byte(mine, topology, now_s)
    for model in mine:
        if model.resident.get(number, 0) < model.nbytes and model.function.lately(now_s) < LEAST:
            worth[model.instance] = 0.0  # there is some of it because others have that, too
    parts = _parts(mine, of, worth)
    room_nbytes = gpu.stats.free_nbytes - max([model.peak_nbytes for model in mine if number in model.resident] + [0])
    artefacts = []
    for key, part in parts.items():
        nbytes, here = part.nbytes, part.here(number)
        if any(model.leased for model in part.models):  # it takes no room, and stays
            nbytes = here = 0
        room_nbytes += here
        value = part.value * (1.0 + (KEEP - 1.0) * here / nbytes) if nbytes else part.value
        artefacts.append(Artefact(key, "", nbytes, value, part.needs))
    fills = _densest if len(artefacts) > FEW and not any(each.needs for each in artefacts) else fill
    for each in fills(artefacts, {"": max(0, room_nbytes)}):
        part = parts[each.key]
        if part.here(number) < part.nbytes and (found := _bringing(part, of.get(each.key))) is not None:
            return found
    return None


def _densest(artefacts: Iterable[Artefact], room: Mapping[str, int]) -> Iterator[Artefact]:
    """As `fill` does it where there are many and none needs another: one after the other, as far as it is looked."""
    left_nbytes = room[""]
    for each in sorted(artefacts, key=lambda each: each.value / max(1, each.nbytes), reverse=True):
        if each.value > 0.0 and each.nbytes <= left_nbytes:
            left_nbytes -= each.nbytes
            yield each


def _may_be_held(model: Model, number: int, comes: Callable[[Model], bool], refused: Callable[[str], bool]) -> bool:
    """Most of it is there, or nowhere more."""
    function, here = model.function, model.resident.get(number, 0)
    elsewhere = max([nbytes for gpu, nbytes in model.resident.items() if gpu != number], default=0)
    if elsewhere > here or (model.leased and not here):
        return False
    if here:
        return True
    return not (function.given_up or refused(function.name) or comes(model))


def _parts(mine: Iterable[Model], of: dict[str, Model], worth: dict[str, float]) -> dict[str, _ModelPart]:
    """By key: the function's name, or what it calls its base."""
    parts: dict[str, _ModelPart] = {}

    def add(key: str, model: Model, nbytes: int, beyond_nbytes: int, needs: str) -> None:
        part = parts.get(key)
        if part is None:
            part = parts[key] = _ModelPart(nbytes, beyond_nbytes, needs)
        part.models.append(model)
        part.value += worth.get(model.instance, 0.0) * nbytes

    for model in mine:
        base, base_nbytes = _base(model, of)
        if base_nbytes:
            add(base, model, base_nbytes, 0, "")
        add(model.function.name, model, model.nbytes - base_nbytes, base_nbytes, base if base_nbytes else "")
    return parts


def _base(model: Model, of: dict[str, Model]) -> tuple[str, int]:
    """What it adds to, and the bytes of that; 0: nothing that is known."""
    function: Function = model.function
    known = of.get(function.base)
    nbytes = known.nbytes if known is not None else function.base_nbytes
    return function.base, nbytes if function.base and nbytes < model.nbytes else 0


def _bringing(part: _ModelPart, own: Model | None) -> Model | None:
    """With whose model it comes: of a base its own, if some instance has that, else one that adds to it."""
    able = [model for model in (part.models if own is None else [own]) if not model.leased]
    return max(able, key=lambda model: (model.rank, model.instance), default=None)
