"""Cost of evicting a segment: pure. A segment is brought back for the next instance that needs it, so its worth is the
sum over all instances that share it (Tangram §3.2.2, Eq. 2: probability of use times sensitivity).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from dormouse.core.decisions.memory.models import KnownModels

NOBODY: Final[frozenset[str]] = frozenset()


class WakeEvictionCost:
    """Costs for one wake. ``worth`` returns the worth of a byte by instance, ascending, once a segment may have to
    leave; an instance that is not in it is worth nothing. ``nbytes_s`` is the bandwidth of the source that would bring
    a segment back; ``nbytes`` returns a segment's size.
    """

    def __init__(
        self,
        models: KnownModels,
        worth: Callable[[], Mapping[str, float]],
        nbytes_s: float,
        nbytes: Callable[[int], int],
    ) -> None:
        self._models, self._ask, self._nbytes_s, self._nbytes = models, worth, nbytes_s, nbytes
        self._told: Mapping[str, float] | None = None

    @property
    def _worth(self) -> Mapping[str, float]:
        if self._told is None:
            self._told = self._ask()
        return self._told

    def __call__(self, segment: int) -> float:
        """Expected seconds."""
        return self.per_byte(segment) * self._nbytes(segment) / self._nbytes_s

    def per_byte(self, segment: int) -> float:
        """Sum of the worths of all instances that share it."""
        worth = self._worth
        return sum([worth.get(instance, 0.0) for instance in self._models.sharers.get(segment, ())])

    def ascending(self, resident: Collection[int]) -> Iterator[int]:
        """``resident`` segments, the cheapest per byte first; the first few cost little to find. Where no segment is
        shared, segments of instances without a worth come last: they have just been woken, and their worth is not
        reported yet.
        """
        models, worth = self._models, self._worth
        if models.shared:
            yield from sorted(resident, key=self.per_byte)
            return
        for instance in worth:  # a model's segments all cost the same per byte
            model = models.by_instance.get(instance)
            for segment in model.nbytes if model is not None else ():  # one that comes has none, maybe
                if segment in resident:
                    yield segment
        for segment in resident:
            if not models.sharers.get(segment, NOBODY) <= worth.keys():  # KV is in no model, and never leaves alone
                yield segment
