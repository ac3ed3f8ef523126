"""Choice of artefacts to hold in places of bounded size for the highest worth (ServerlessLoRA §4.1, Eq. 1): pure.

A knapsack with precedence: an artefact is of use only beside the one that it needs (an adapter beside its backbone, a
context beside its libraries), which may lie in another place. Greedy by value per byte. Others may need an artefact of
little value, so the comparison is not of single artefacts but of *blocks*: an artefact with those of its dependants
that make it denser (Horn's decomposition of a tree, which orders jobs on one machine in the same way). Bytes of several
places are compared as shares of these places.

Greed goes wrong where few things fill a place. There, it is tried again with each of the dearest taken first or left
out, and the best of all counts. A test and benchmarks/preloading.py compare it with an exact optimum.

With many artefacts all of this takes milliseconds, so it is done in slices: each generator yields the work done, in
about microseconds.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import combinations
from operator import attrgetter
from typing import Final, NamedTuple, TypeAlias, TypeVar

TRIES: Final = 8
"""Artefacts that are taken first, and left out, for a try."""

PAIRED: Final = 5
"""Of these, also two are taken first: each alone may leave no room for the other."""

ROUNDS: Final = 2
"""Rounds of tries: each begins with the best of the one before."""

FEW: Final = 24
"""Artefacts up to which there are tries: with more, none fills much of a place."""

T = TypeVar("T")
Slices: TypeAlias = Generator[int, None, T]


class Artefact(NamedTuple):
    """``nbytes`` of ``place``. ``value`` is its saving, in expected seconds of waiting per second. ``needs``
    is another's key; "": none's.
    """

    key: str
    place: str
    nbytes: int
    value: float
    needs: str = ""


class _Block:
    """Artefacts that are taken together, those that are needed first. ``weight`` is the sum of shares of places."""

    __slots__ = ("before", "inner", "items", "value", "weight")

    def __init__(self, item: Artefact, weight: float) -> None:
        self.items, self.value, self.weight = [item], item.value, weight
        self.inner: list[_Block] = []  # that may follow
        self.before: list[tuple[int, float, float, _Block]] = []  # its state before each block that came to it

    @property
    def density(self) -> float:
        return self.value / self.weight if self.weight > 0.0 else float("inf")

    def add(self, other: "_Block") -> None:
        self.before.append((len(self.items), self.value, self.weight, other))
        self.items += other.items
        self.value += other.value
        self.weight += other.weight

    def without_last(self) -> "_Block":
        """The same before the last one came to it; that may follow by itself. There is one."""
        count, value, weight, last = self.before[-1]
        less = _Block(self.items[0], weight)
        less.items, less.value, less.before = self.items[:count], value, self.before[:-1]
        after = set(map(id, last.inner))
        less.inner = [last, *(each for each in self.inner if id(each) not in after)]
        return less


def fill(artefacts: Sequence[Artefact], room: Mapping[str, int]) -> list[Artefact]:
    """Artefacts to hold, in the order in which they are to be brought. Those that need an unknown one are left out.

    Args:
        room: bytes by place.
    """
    slices = filling(artefacts, room)
    while True:
        try:
            next(slices)
        except StopIteration as end:
            found: list[Artefact] = end.value
            return found


def filling(artefacts: Sequence[Artefact], room: Mapping[str, int]) -> Slices[list[Artefact]]:
    """`fill`, in slices."""
    known = {each.key: each for each in artefacts}
    artefacts = [each for each in artefacts if not known[_chain(each, known)[0]].needs]
    best = yield from _greedy(artefacts, room)
    if len(artefacts) > FEW:
        return best
    first, value = list[str](), _value(best)
    dearest = sorted(artefacts, key=attrgetter("value"), reverse=True)[:TRIES]
    for _ in range(ROUNDS):
        before, kept, chains = value, artefacts, first
        tries: list[tuple[list[Artefact], list[str]]] = []
        for dear in dearest:
            tries += [(artefacts, [*chains, *_chain(dear, known)])]
            tries += [([each for each in kept if dear.key not in _chain(each, known)], chains)]
            yield len(kept)
        for one, other in combinations(dearest[:PAIRED], 2):
            tries += [(artefacts, [*chains, *_chain(one, known), *_chain(other, known)])]
        for some, tried in tries:
            found = yield from _greedy(some, room, tried)
            if (total := _value(found)) > value * (1.0 + 1e-9):
                best, value, artefacts, first = found, total, some, tried
        if value <= before:
            break
    return best


def _value(artefacts: Iterable[Artefact]) -> float:
    return sum([each.value for each in artefacts])


def _chain(artefact: Artefact, known: Mapping[str, Artefact]) -> list[str]:
    """Keys of all that it needs, and its own, that which is needed first."""
    chain = [artefact.key]
    while artefact.needs and artefact.needs in known and artefact.needs not in chain:
        artefact = known[artefact.needs]
        chain.append(artefact.key)
    return chain[::-1]


def _greedy(
    artefacts: Sequence[Artefact], room: Mapping[str, int], first: Sequence[str] = ()
) -> Slices[list[Artefact]]:
    """``first`` are keys that are taken before all others, if they fit."""
    greed = Greed(room)
    if first:
        known = {each.key: each for each in artefacts}
        greed.take([known[key] for key in dict.fromkeys(first) if key in known])
    yield from greed.offer(artefacts)
    while (yield from greed.next()):
        pass
    return greed.found


class Greed:
    """Takes offered artefacts, by blocks, the densest first; later offers only if they are not denser."""

    def __init__(self, room: Mapping[str, int]) -> None:
        self.found: list[Artefact] = []
        self.left = dict(room)
        self._room = room
        self._taken: set[str] = set()
        self._order: list[tuple[float, int, _Block]] = []
        self._number = 0

    @property
    def densest(self) -> float:
        """Value of the next block, for each whole place that it takes."""
        return -self._order[0][0] if self._order else -1.0

    def offer(self, artefacts: Iterable[Artefact]) -> Slices[None]:
        """Offers artefacts, in blocks with those that they need and that are not taken."""
        for block in (yield from _blocks(artefacts, self._room, self._taken)):
            self._push(block)

    def _push(self, block: _Block) -> None:
        if block.value > 0.0:
            heappush(self._order, (-block.density, self._number, block))
            self._number += 1

    def take(self, items: Sequence[Artefact]) -> bool:
        """Takes all of them, or none if there is no room; returns whether it did."""
        left, wanted = self.left, dict[str, int]()
        for item in items:
            wanted[item.place] = wanted.get(item.place, 0) + item.nbytes
        if any(nbytes > left.get(place, -1) for place, nbytes in wanted.items()):
            return False
        for place, nbytes in wanted.items():
            left[place] -= nbytes
        self._taken.update([item.key for item in items])
        self.found += items
        return True

    def next(self) -> Slices[list[Artefact]]:
        """Takes the densest block that fits, and returns it; [] if there is none."""
        while self._order:
            block = heappop(self._order)[2]
            yield 2 + len(block.items) // 4
            if self.take(block.items):
                for each in block.inner:
                    self._push(each)
                return block.items
            if block.before:  # without some of its denser parts, it may fit
                self._push(block.without_last())
        return []


def _weight(item: Artefact, room: Mapping[str, int]) -> float:
    return item.nbytes / (room.get(item.place, 0) or 1)


def _blocks(artefacts: Iterable[Artefact], room: Mapping[str, int], taken: set[str]) -> Slices[list[_Block]]:
    """Of all trees whose root needs nothing more. Deepest first, so each artefact finds its dependants' blocks."""
    children: dict[str, list[Artefact]] = {}
    order: list[Artefact] = []
    for item in artefacts:
        if item.key in taken:
            continue
        if not item.needs or item.needs in taken:
            order.append(item)
        else:
            children.setdefault(item.needs, []).append(item)
    roots = len(order)
    for item in order:  # it grows
        order.extend(children.get(item.key, ()))
    made: dict[str, _Block] = {}
    for item in reversed(order):
        block = made[item.key] = _Block(item, _weight(item, room))
        yield 2
        if item.key in children:
            yield from _grow(block, [made.pop(child.key) for child in children[item.key]])
    return [made[root.key] for root in order[:roots]]


def _grow(block: _Block, inner: Iterable[_Block]) -> Slices[None]:
    """By all that makes it denser."""
    order: list[tuple[float, int, _Block]] = []
    number = 0
    for number, each in enumerate(inner):
        heappush(order, (-each.density, number, each))
        yield 1
    while order and (block.value <= 0.0 or -order[0][0] > block.density):
        best = heappop(order)[2]
        if best.value <= 0.0:
            heappush(order, (-best.density, number + 1, best))
            break
        block.add(best)
        yield 2
        for each in best.inner:
            number += 1
            heappush(order, (-each.density, number + 1, each))
    block.inner = [each for _, _, each in order]
