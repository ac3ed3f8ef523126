"""The store, played: models by version, and tickets for places. It answers when it is told to."""

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from lease_memory import SEGMENTS, size

from dormouse.schemas import messages as m

if TYPE_CHECKING:
    from lease_world import World


class Store:
    """Models by version, and tickets. It answers when it is told to."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.sizes: dict[int, int] = {}  # by segment
        self.values: dict[int, int] = {}  # by segment: for ever
        self.models: dict[str, m.Manifest] = {}  # the newest, of instances that there are
        self.asked: dict[int, m.AskPlace] = {}  # not answered
        self.placed: dict[int, list[m.Place]] = {}  # by ticket, until it is let go or written
        self._owner: dict[int, tuple[str, list[int]]] = {}  # (instance, storages) by ticket
        self._slab: dict[int, int] = {}  # value by offset
        self._tickets: Counter[int] = Counter()
        self._offsets = itertools.count(1)
        for number in range(SEGMENTS):
            self.new(size(1 + number % 3), 100 + number)

    def new(self, nbytes: int, segment: int = 0) -> int:
        segment = segment or self.world.fresh()
        self.sizes[segment], self.values[segment] = nbytes, self.world.fresh()
        return segment

    def publish(self, name: str, entries: dict[int, int], order: list[int] | None = None, newer: bool = True) -> None:
        """``entries``: segment by storage."""
        before = self.models.get(name)
        version = (before.version if before is not None else 0) + newer
        self.models[name] = m.Manifest(
            instance=name,
            version=version,
            entries=[m.Entry(storage=n, segment=s, offset=0, nbytes=self.sizes[s]) for n, s in entries.items()],
            segments=[(s, self.sizes[s]) for s in order or entries.values()],
        )
        self.world.from_store.append(self.models[name])

    def entries(self, name: str) -> dict[int, int]:
        model = self.models.get(name)
        return {} if model is None else {entry.storage: entry.segment for entry in model.entries}

    def drop(self, name: str) -> None:
        if self.models.pop(name, None) is not None:
            self.world.from_store.append(m.Dropped(instance=name))

    def heard(self, message: m.ExecutorToStore) -> None:
        match message:
            case m.AskPlace(ticket=ticket):
                assert not self._tickets[ticket], "asked twice"
                self._tickets[ticket] = 1
                self._owner[ticket] = (message.instance, [storage for storage, _ in message.storages])
                self.asked[ticket] = message
            case m.Written(ticket=ticket, freed=freed):
                assert ticket in self.placed, "written to what is not its own"
                places = self.placed.pop(ticket)
                name, storages = self._owner[ticket]
                assert all(place.offset in self._slab for place in places), "written, and it was not"
                if name in self.models:
                    entries = {n: s for n, s in self.entries(name).items() if n not in freed}
                    for storage, place in zip(storages, places, strict=True):
                        self.values[place.segment] = self._slab[place.offset]
                        entries[storage] = place.segment
                    self.publish(name, entries)
            case m.LetGo(ticket=ticket):
                assert self._tickets[ticket] == 1, "let go twice, or never asked"
                self._tickets[ticket] = 2
                self.asked.pop(ticket, None)
                self.placed.pop(ticket, None)
            case _:
                assert isinstance(message, m.FirstUse)

    def answer(self, ticket: int, refuse: bool) -> None:
        ask = self.asked.pop(ticket)
        if refuse or ask.instance not in self.models:
            self.world.no_room |= {s for s, wake in self.world.wakes.items() if wake.instance == ask.instance}
            self.world.from_store.append(m.PlaceRefused(ticket=ticket, text="no room"))
            return
        places = []
        for _, nbytes in ask.storages:
            segment = self.new(nbytes)
            places.append(m.Place(segment=segment, slab=ticket, offset=next(self._offsets), nbytes=nbytes))
        self.placed[ticket] = places
        self.world.from_store.append(m.Placed(ticket=ticket, places=places))

    def write(self, place: m.Place, value: int) -> None:
        assert place in self.placed[place.slab], "it was let go"
        self._slab[place.offset] = value

    def read(self, place: m.Place) -> int:
        assert place in self.placed[place.slab], "it was let go"
        return self._slab[place.offset]
