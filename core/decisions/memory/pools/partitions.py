"""Keeps partitions of memory and the blocks in them as Torpor's prototype does (its §4.4 and published code).

A partition of 64 slots (128 MiB at 2 MiB a slot) is typed by its first block and untyped again when it is empty:

- *regular*: blocks of exactly 1 or 10 slots (2 and 20 MiB, as PyTorch's allocator asks for), at multiples of their
  own length, so that 10 slots fit six times;
- *irregular*: any other size up to a partition, rounded up to a power of two of at least 8 slots;
- *whole*: larger blocks take consecutive untyped partitions. (The prototype leaves these to the driver.)

A model's blocks are consolidated by the order in which partitions are tried: those that took a block of the same model,
then the one with most free slots, then an untyped one.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

SLOTS: Final = 64
COMMON: Final = (1, 10)
MIN: Final = 8
FULL: Final = (1 << SLOTS) - 1


class PartitionKind(Enum):
    UNTYPED = 0
    REGULAR = 1
    IRREGULAR = 2
    WHOLE = 3


class SlotRange(NamedTuple):
    """Slots ``[first, +slots)`` counted over all partitions."""

    first: int
    slots: int

    @property
    def kind(self) -> PartitionKind:
        if self.slots in COMMON:
            return PartitionKind.REGULAR
        return PartitionKind.IRREGULAR if self.slots <= SLOTS else PartitionKind.WHOLE

    @property
    def partitions(self) -> range:
        """Those that it lies in."""
        return range(self.first // SLOTS, -(-(self.first + self.slots) // SLOTS))


def rounded(slots: int) -> int:
    """Slots given to a request of ``slots`` slots."""
    if slots in COMMON:
        return slots
    if slots > SLOTS:
        return -(-slots // SLOTS) * SLOTS
    return max(MIN, 1 << (slots - 1).bit_length())


NOWHERE: Final = SlotRange(0, 0)
"""The place of a block that has none yet."""


class Partitions:
    """Taken slots of ``count`` partitions."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.kinds = [PartitionKind.UNTYPED] * count
        self._taken = [0] * count  # a bit per slot
        self._room = [SLOTS] * count  # free slots
        self.free_slots = count * SLOTS

    def copy(self) -> "Partitions":
        other = Partitions(0)
        other.count, other.kinds, other._taken = self.count, self.kinds.copy(), self._taken.copy()
        other._room, other.free_slots = self._room.copy(), self.free_slots
        return other

    def find(self, slots: int, active: dict[int, None], within: Sequence[int] | None = None) -> SlotRange | None:
        """A free place of ``rounded(slots)``.

        Args:
            active: partitions to try first; remembers the choice.
            within: the only ones to look at, ascending; a place of several partitions has at least one of them.
        """
        slots = rounded(slots)
        kind = SlotRange(0, slots).kind
        if kind is PartitionKind.WHOLE:
            return self._find_whole(slots)
        tried = active if within is None else [number for number in active if number in within]
        for number in tried:
            if self.kinds[number] is kind and (place := self._find_inside(number, slots)) is not None:
                return place
        numbers = range(self.count) if within is None else within
        kinds, room = self.kinds, self._room
        typed = [number for number in numbers if kinds[number] is kind and room[number] >= slots]
        typed.sort(key=room.__getitem__, reverse=True)
        for number in typed:
            if number not in active and (place := self._find_inside(number, slots)) is not None:
                active[number] = None
                return place
        untyped = next((number for number in numbers if kinds[number] is PartitionKind.UNTYPED), None)
        if untyped is None:
            return None
        active[untyped] = None
        return SlotRange(untyped * SLOTS, slots)

    def fits(self, place: SlotRange) -> bool:
        """Whether exactly this place is free, in a partition that is of its kind or untyped."""
        number, inside = divmod(place.first, SLOTS)
        if place.kind is PartitionKind.WHOLE:
            return all(kind is PartitionKind.UNTYPED for kind in self.kinds[number : number + place.slots // SLOTS])
        mask = ((1 << place.slots) - 1) << inside
        return self.kinds[number] in (place.kind, PartitionKind.UNTYPED) and not self._taken[number] & mask

    def take(self, place: SlotRange) -> None:
        number, inside = divmod(place.first, SLOTS)
        if place.kind is PartitionKind.WHOLE:
            for each in range(number, number + place.slots // SLOTS):
                self.kinds[each], self._taken[each], self._room[each] = PartitionKind.WHOLE, FULL, 0
        else:
            self.kinds[number] = place.kind
            self._taken[number] |= ((1 << place.slots) - 1) << inside
            self._room[number] -= place.slots
        self.free_slots -= place.slots

    def give(self, place: SlotRange) -> None:
        number, inside = divmod(place.first, SLOTS)
        if place.kind is PartitionKind.WHOLE:
            for each in range(number, number + place.slots // SLOTS):
                self.kinds[each], self._taken[each], self._room[each] = PartitionKind.UNTYPED, 0, SLOTS
        else:
            self._taken[number] &= ~(((1 << place.slots) - 1) << inside)
            self._room[number] += place.slots
            if not self._taken[number]:
                self.kinds[number] = PartitionKind.UNTYPED
        self.free_slots += place.slots

    def longest_untyped(self) -> int:
        """Most consecutive untyped partitions."""
        longest = run = 0
        for kind in self.kinds:
            run = run + 1 if kind is PartitionKind.UNTYPED else 0
            longest = max(longest, run)
        return longest

    def _find_inside(self, number: int, slots: int) -> SlotRange | None:
        """The first free place in a typed partition."""
        if self._room[number] < slots:
            return None
        taken, mask = self._taken[number], (1 << slots) - 1
        for slot in range(0, SLOTS - slots + 1, slots):
            if not taken & (mask << slot):
                return SlotRange(number * SLOTS + slot, slots)
        return None

    def _find_whole(self, slots: int) -> SlotRange | None:
        wanted, run = slots // SLOTS, 0
        for number, kind in enumerate(self.kinds):
            run = run + 1 if kind is PartitionKind.UNTYPED else 0
            if run == wanted:
                return SlotRange((number - wanted + 1) * SLOTS, slots)
        return None
