"""Next artefact for a GPU: the first missing one of the set that would be worth most there. Pure.

Causes of a late first token that can be removed ahead, as artefacts:

* a model's bytes, worth the wait for their copy (families.py); those of a base, worth the sum over all models that add
  to it; the part of a model beyond its base, which is of use only beside that;
* a runtime of a language model, worth the time that its process takes to be there, with its context and its kernels. A
  lease opens it while its model is copied, so without the model it would save little, and it is held beside that only.
  Its context lies beside the pool, in the memory that the executor has found there.

A function's process with its interpreter and libraries is there as long as it is deployed, and so is the process from
which runtimes are forked: there is nothing to choose.

filling.py decides which of them fit. Where there are many artefacts, only possible choices are looked at: those that
are there, and the others of highest worth. All of it is done in slices, while events go on.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Final

from dormouse.core.decisions.scheduling.families import Families, ModelFamily, per_byte, per_second
from dormouse.core.decisions.scheduling.filling import FEW, Artefact, Greed, Slices, filling
from dormouse.core.decisions.scheduling.functions import Function
from dormouse.core.decisions.scheduling.state import Gpu, Model
from dormouse.core.decisions.scheduling.topology import Bandwidths

MIN: Final = 0.01
"""Requests of lately that a function must have had, as its rate counts them: about seven half-lives after one."""

KEEP: Final = 4.0
"""Factor on the worth of held artefacts against those that could take their place: copies are not for nothing."""

BESIDE: Final = "beside"
"""The place of contexts: a GPU's memory that is not its pool's. The place of all else is "", the pool."""

PROCESS: Final = " "
"""Begins the key of a runtime: no function's name does."""


class _ModelPart:
    """A base, all of a model beyond its base, or a runtime, which is ``process``. ``models`` have it; ``value`` is its
    worth to all of them. So many bytes are ``here``.
    """

    __slots__ = ("beyond_nbytes", "here", "models", "nbytes", "needs", "own", "place", "process", "value")

    def __init__(
        self,
        nbytes: int,
        beyond_nbytes: int,
        needs: str,
        own: Model | None,
        process: bool = False,
        place: str = "",
    ) -> None:
        self.nbytes, self.beyond_nbytes, self.needs, self.own, self.process = nbytes, beyond_nbytes, needs, own, process
        self.place = place
        self.models: list[Model] = []
        self.value = 0.0
        self.here = 0

    def add(self, model: Model, value: float, gpu: int) -> None:
        self.models.append(model)
        self.value += value
        if not self.process:
            self.here = max(self.here, min(self.nbytes, model.resident.get(gpu, 0) - self.beyond_nbytes))

    def artefact(self, key: str) -> Artefact:
        nbytes, here = self.nbytes, self.here
        if self.leased:
            nbytes = here = 0
        value = self.value * (1.0 + (KEEP - 1.0) * here / nbytes) if here else self.value
        return Artefact(key, self.place, nbytes, value, self.needs)

    @property
    def leased(self) -> bool:
        """It takes no room, and stays."""
        return any(model.leased for model in self.models)

    @property
    def room_nbytes(self) -> int:
        """That it has, and that could be another's."""
        return 0 if self.leased else self.here

    def bringing(self) -> Model | None:
        """The model with which it comes: of a base its own, if some instance has that, else one that adds to it. None:
        it is there, or no model can come.
        """
        if self.here >= self.nbytes and not self.process:
            return None
        able = [model for model in (self.models if self.own is None else [self.own]) if not model.leased]
        return max(able, key=lambda model: (model.rank, model.instance), default=None)


class Holding:
    """Artefacts that one GPU could hold.

    Args:
        coming: whether this instance's model is on its way to some GPU without a lease.
        refused: whether the GPU's executor had no room for this function's.
        opened: whether this runtime has been opened there of late.
    """

    def __init__(
        self,
        gpu: Gpu,
        families: Families,
        topology: Bandwidths,
        coming: Callable[[str], bool],
        refused: Callable[[str], bool],
        opened: Callable[[str], bool],
    ) -> None:
        self.gpu, self._families, self._topology = gpu, families, topology
        self._coming, self._refused, self._opened = coming, refused, opened
        self._parts: dict[str, _ModelPart] = {}

    def wanted(self, now_s: float) -> Generator[int | Model, None, None]:
        """In slices: the artefacts that are to be there and are not, one after the other."""
        gpu, families = self.gpu, self._families
        here = {family.name: family for name in gpu.resident if (family := families.of(name)) is not None}
        artefacts: list[Artefact] = []
        for family in here.values():
            artefacts += yield from self._artefacts(family, now_s)
        room_nbytes = gpu.stats.free_nbytes + sum([part.room_nbytes for part in self._parts.values()])
        known = [model for name in gpu.resident if (model := families.model(name)) is not None]
        room_nbytes = max(0, room_nbytes - max([model.peak_nbytes for model in known], default=0))
        room = {"": room_nbytes, BESIDE: self._beside_nbytes}
        yield len(known)
        others = [name for _, name in families.order if name not in here]
        if len(families) > FEW:
            yield from self._densest(artefacts, others, room, now_s)
            return
        for name in others:
            if (each := families.by_name.get(name)) is not None:
                artefacts += yield from self._artefacts(each, now_s)
        yield from self._missing((yield from filling(artefacts, room)))

    def _densest(
        self, artefacts: list[Artefact], others: Iterable[str], room: dict[str, int], now_s: float
    ) -> Generator[int | Model, None, None]:
        """As `filling` does it where there are many, as far as it is looked."""
        greed, families = Greed(room), self._families.by_name
        yield from greed.offer(artefacts)
        for name in others:
            yield 2
            family = families.get(name)
            if family is None or family.lately(now_s) < MIN:
                continue
            if (only := family.only) is not None and not self._may_be_held(only):
                continue  # as for most models of other GPUs
            most = family.most_per_byte(now_s) * room[""]
            while greed.densest > most:
                yield from self._missing((yield from greed.next()))
            if family.least_nbytes <= greed.left[""]:
                yield from greed.offer((yield from self._artefacts(family, now_s)))
        while items := (yield from greed.next()):
            yield from self._missing(items)

    def _missing(self, artefacts: Iterable[Artefact]) -> Iterator[Model]:
        for each in artefacts:
            if (found := self._parts[each.key].bringing()) is not None:
                yield found

    def lacks(self, model: Model) -> bool:
        """Whether it may still come, or its runtime, after others have."""
        if model.leased or not self._may_be_held(model):
            return False
        return model.resident.get(self.gpu.number, 0) < model.nbytes or self._lacks_runtime(model)

    def _artefacts(self, family: ModelFamily, now_s: float) -> Slices[list[Artefact]]:
        """Those of the family that may be held here."""
        number, parts = self.gpu.number, dict[str, _ModelPart]()
        for model in family.models():
            yield 4
            if not self._may_be_held(model):
                continue
            function, worth = model.function, 0.0
            if model.resident.get(number, 0) >= model.nbytes or function.lately(now_s) >= MIN:
                worth = per_byte(model, self._topology, now_s)
            own, base, base_nbytes = function.name, function.base, _base_nbytes(model, family)
            if base_nbytes:
                if base not in parts:
                    parts[base] = _ModelPart(base_nbytes, 0, "", family.of(base))
                parts[base].add(model, worth * base_nbytes, number)
            if own not in parts:
                parts[own] = _ModelPart(model.nbytes - base_nbytes, base_nbytes, base if base_nbytes else "", model)
            parts[own].add(model, worth * (model.nbytes - base_nbytes), number)
            if worth and self._lacks_runtime(model):
                key = f"{PROCESS}{model.runtime}"
                if key not in parts:
                    parts[key] = self._runtime(function, base if base_nbytes else own)
                parts[key].add(model, per_second(function, now_s) * function.start_s, number)
        self._parts |= parts
        return [part.artefact(key) for key, part in parts.items()]

    def _runtime(self, function: Function, needs: str) -> _ModelPart:
        """A runtime: in the memory for models, if the function says so, else beside it."""
        if function.context_nbytes or not self.gpu.context_nbytes:
            return _ModelPart(function.context_nbytes, 0, needs, None, process=True)
        return _ModelPart(self.gpu.context_nbytes, 0, needs, None, process=True, place=BESIDE)

    @property
    def _beside_nbytes(self) -> int:
        """Bytes beside the pool that no runtime's context has."""
        gpu = self.gpu
        return max(0, gpu.beside_nbytes - gpu.context_nbytes * len(gpu.runtimes))

    def _lacks_runtime(self, model: Model) -> bool:
        return bool(model.runtime) and model.runtime not in self.gpu.runtimes and not self._opened(model.runtime)

    def _may_be_held(self, model: Model) -> bool:
        """Most of it is there, or nowhere more."""
        number = self.gpu.number
        function, here = model.function, model.resident.get(number, 0)
        if not model.nbytes or (model.leased and not here):
            return False
        for gpu, nbytes in model.resident.items():
            if nbytes > here and gpu != number:
                return False
        return here > 0 or not (function.given_up or self._refused(function.name) or self._coming(model.instance))


def _base_nbytes(model: Model, family: ModelFamily) -> int:
    """Bytes of its base; 0: none, or unknown."""
    function = model.function
    if not function.base:
        return 0
    known = family.of(function.base)
    nbytes = known.nbytes if known is not None else function.base_nbytes
    return nbytes if nbytes < model.nbytes else 0
