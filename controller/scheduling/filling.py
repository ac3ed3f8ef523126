"""What is to be held in places of bounded size so that it is worth most (ServerlessLoRA §4.1, Eq. 1): pure.

A knapsack with precedence: an artefact is of use only beside the one that it needs (an adapter beside its backbone, a
context beside its libraries), which may lie in another place. Greedy by value per byte. An artefact of little value
may be what others need, so what is compared are not single artefacts but *blocks*: an artefact with those of its
dependants that make it denser (Horn's decomposition of a tree, which orders jobs on one machine in the same way). Bytes
of several places are compared as shares of these places.

Greed goes wrong where few things fill a place. There, it is tried again with each of the dearest taken first or left
out, and the best of all counts. A test and benchmarks/preloading.py compare it with an exact optimum.
"""

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Final, NamedTuple

TRIES: Final = 8
"""Artefacts that are taken first, and left out, for a try."""

ROUNDS: Final = 2
"""Each begins with what was best in the one before."""

FEW: Final = 24
"""Artefacts up to which there are tries: with more, none fills much of a place."""


class Artefact(NamedTuple):
    """``nbytes`` of ``place``. ``value`` is what holding it saves, in expected seconds of waiting per second. ``needs``
    is another's key; "": none's.
    """

    key: str
    place: str
    nbytes: int
    value: float
    needs: str = ""


class _Block:
    """Artefacts that are taken together, those that are needed first. ``weight`` is the sum of shares of places."""

    __slots__ = ("inner", "items", "value", "weight")

    def __init__(self, item: Artefact, weight: float) -> None:
        self.items, self.value, self.weight = [item], item.value, weight
        self.inner: list[_Block] = []  # that may follow

    @property
    def density(self) -> float:
        return self.value / self.weight if self.weight > 0.0 else float("inf")


_density = attrgetter("density")


def fill(artefacts: Sequence[Artefact], room: Mapping[str, int]) -> list[Artefact]:
    """What to hold, in the order in which it is to be brought. What needs something unknown is left out.

    Args:
        room: bytes by place.
    """
    known = {each.key: each for each in artefacts}
    artefacts = [each for each in artefacts if not known[_chain(each, known)[0]].needs]
    best, first = _greedy(artefacts, room), list[str]()
    if len(artefacts) > FEW:
        return best
    value = _value(best)
    dearest = sorted(artefacts, key=attrgetter("value"), reverse=True)[:TRIES]
    for _ in range(ROUNDS):
        before, kept, chains = value, artefacts, first
        for dear in dearest:
            chain = [*chains, *(key for key in _chain(dear, known) if key not in chains)]
            others = [each for each in kept if dear.key not in _chain(each, known)]
            for some, tried in ((artefacts, chain), (others, chains)):
                found = _greedy(some, room, tried)
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


def _greedy(artefacts: Sequence[Artefact], room: Mapping[str, int], first: Sequence[str] = ()) -> list[Artefact]:
    """By blocks. ``first`` are keys that are taken before all others, if they fit."""
    left, taken, found = dict(room), set[str](), list[Artefact]()
    known = {each.key: each for each in artefacts}

    def take(items: Sequence[Artefact]) -> bool:
        wanted: dict[str, int] = {}
        for item in items:
            wanted[item.place] = wanted.get(item.place, 0) + item.nbytes
        if any(nbytes > left.get(place, -1) for place, nbytes in wanted.items()):
            return False
        for place, nbytes in wanted.items():
            left[place] -= nbytes
        taken.update([item.key for item in items])
        found.extend(items)
        return True

    if first:
        take([known[key] for key in first if key in known])
    open_ = _blocks(artefacts, room, taken)
    order = [(-block.density, number, block) for number, block in enumerate(open_)]
    heapify(order)
    number = len(order)
    while order:
        _, _, block = heappop(order)
        if block.value <= 0.0:
            continue
        if take(block.items):
            follow = block.inner
        elif len(block.items) > 1:  # without some of what makes it denser, it may fit
            follow = [_smaller(block, room)]
        else:
            continue
        for each in follow:
            heappush(order, (-each.density, number, each))
            number += 1
    return found


def _weight(item: Artefact, room: Mapping[str, int]) -> float:
    return item.nbytes / (room.get(item.place, 0) or 1)


def _blocks(artefacts: Sequence[Artefact], room: Mapping[str, int], taken: set[str]) -> list[_Block]:
    """Of all trees whose root needs nothing more. Deepest first, so each artefact finds its dependants' blocks."""
    children: dict[str, list[Artefact]] = {}
    roots: list[Artefact] = []
    for item in artefacts:
        if item.key in taken:
            continue
        if not item.needs or item.needs in taken:
            roots.append(item)
        else:
            children.setdefault(item.needs, []).append(item)
    order, index = list(roots), 0
    while index < len(order):
        order.extend(children.get(order[index].key, ()))
        index += 1
    made: dict[str, _Block] = {}
    for item in reversed(order):
        inner = [made.pop(child.key) for child in children.get(item.key, ())]
        made[item.key] = _grown(_Block(item, _weight(item, room)), inner)
    return [made[root.key] for root in roots]


def _grown(block: _Block, inner: Iterable[_Block]) -> _Block:
    """With all that makes it denser."""
    order = [(-each.density, number, each) for number, each in enumerate(inner)]
    heapify(order)
    number = len(order)
    while order and (block.value <= 0.0 or order[0][2].density > block.density):
        _, _, best = heappop(order)
        if best.value <= 0.0:
            break
        block.items = block.items + best.items
        block.value += best.value
        block.weight += best.weight
        for each in best.inner:
            heappush(order, (-each.density, number, each))
            number += 1
    block.inner = [each for _, _, each in order]
    return block


def _smaller(block: _Block, room: Mapping[str, int]) -> _Block:
    """The same without its last artefact of least density, which nothing in it needs; that may follow by itself."""
    needed = {item.needs for item in block.items}
    loose = [item for item in block.items[1:] if item.key not in needed]
    least = min(loose, key=lambda item: item.value / (_weight(item, room) or 1e-30))
    rest = [item for item in block.items if item is not least]
    smaller = _Block(rest[0], sum([_weight(item, room) for item in rest]))
    smaller.items, smaller.value = rest, _value(rest)
    alone = _Block(least, _weight(least, room))
    alone.inner = [each for each in block.inner if each.items[0].needs == least.key]
    smaller.inner = [alone, *(each for each in block.inner if each.items[0].needs != least.key)]
    return smaller
