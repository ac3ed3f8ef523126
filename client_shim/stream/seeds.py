"""The seed of each generator that was seeded, and the executor on which it lives; pure. Executors make the random
numbers.
"""

from collections.abc import Iterator

from dormouse.schemas import stream as wire
from dormouse.schemas.messages import Lease


class Seeds:
    """The seeds of one instance, by generator id."""

    def __init__(self) -> None:
        self._seeds: dict[int, int] = {}  # of those that were ever seeded
        self._places: dict[int, tuple[int, int]] = {}  # GPU and epoch
        self._moves = 0

    def seed(self, generator: int, seed: int, lease: Lease | None) -> tuple[int, int, int] | None:
        """The command to send, if a lease is held."""
        self._seeds[generator] = seed
        self._places.pop(generator, None)
        if lease is None:
            return None
        self._places[generator] = lease.gpu, lease.epoch
        return wire.SEED, generator, seed & (2**63 - 1)

    def begin(self, lease: Lease) -> Iterator[tuple[int, int, int]]:
        """The commands at the beginning of a lease: a generator's state does not travel, so on another GPU it goes on
        from a new seed, derived from its own.
        """
        place = lease.gpu, lease.epoch
        for generator, seed in self._seeds.items():
            if self._places.get(generator) != place:
                moved = self._moves if generator in self._places else 0
                self._places[generator] = place
                yield wire.SEED, generator, (seed + moved * 0x9E3779B97F4A7C15) & (2**63 - 1)
        self._moves += 1
