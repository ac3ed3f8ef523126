"""Accounts of bytes held over time: pure. Bytes are held by groups of owners, and counted in byte-milliseconds, as
whole numbers: the groups' sums add up to the total, and nothing is lost between two countings.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, NamedTuple

STATE_S: Final = 2.0
"""Between two statements of use. A process that is killed takes so much with it."""


class OwnerGroup(NamedTuple):
    """``kind`` is what the bytes are. Without owners, they are nobody's."""

    kind: str
    owners: tuple[str, ...]

    @classmethod
    def of(cls, kind: str, owners: Iterable[str]) -> "OwnerGroup":
        return cls(kind, tuple(sorted(owners)))


class Holdings:
    """Things by any key, each with its bytes and the group that holds it."""

    def __init__(self) -> None:
        self._things: dict[Hashable, tuple[OwnerGroup, int]] = {}
        self._nbytes: Counter[OwnerGroup] = Counter()
        self._kinds: Counter[str] = Counter()  # bytes by kind
        self._since_ms: dict[OwnerGroup, int] = {}  # when the time of a group that holds something was last counted
        self._held: Counter[OwnerGroup] = Counter()  # byte-milliseconds that were counted and not taken yet

    def put(self, key: Hashable, group: OwnerGroup, nbytes: int, now_ms: int) -> None:
        """From now on this thing is that large, and held by this group; with no bytes, it is not there."""
        before = self._things.get(key)
        if before == (group, nbytes) or (before is None and not nbytes):
            return
        if before is not None:
            self._change(before[0], -before[1], now_ms)
            del self._things[key]
        if nbytes:
            self._change(group, nbytes, now_ms)
            self._things[key] = group, nbytes

    def drop(self, key: Hashable, now_ms: int) -> None:
        before = self._things.get(key)
        if before is not None:
            self.put(key, before[0], 0, now_ms)

    def _change(self, group: OwnerGroup, nbytes: int, now_ms: int) -> None:
        self._count(group, now_ms)
        self._nbytes[group] += nbytes
        self._kinds[group.kind] += nbytes
        if not self._nbytes[group]:
            del self._nbytes[group], self._since_ms[group]

    def _count(self, group: OwnerGroup, now_ms: int) -> None:
        since_ms = self._since_ms.get(group, now_ms)
        self._since_ms[group] = max(since_ms, now_ms)
        if now_ms > since_ms:
            self._held[group] += self._nbytes[group] * (now_ms - since_ms)

    def take(self, now_ms: int) -> list[tuple[OwnerGroup, int]]:
        """Byte-milliseconds by group, since the last time."""
        for group in list(self._nbytes):
            self._count(group, now_ms)
        held, self._held = self._held, Counter()
        return sorted(held.items())

    def nbytes(self, group: OwnerGroup) -> int:
        """The bytes that it holds now."""
        return self._nbytes[group]

    def of_kind(self, kind: str) -> int:
        """The bytes that all groups of a kind hold now."""
        return self._kinds[kind]

    @property
    def groups(self) -> Sequence[OwnerGroup]:
        """Those that hold something now."""
        return list(self._nbytes)

    @property
    def empty(self) -> bool:
        """Whether nothing is held, and nothing is to be taken."""
        return not self._nbytes and not self._held


def split(amount: int, parts: Sequence[int]) -> list[int]:
    """An amount in proportion to ``parts``, in whole numbers that add up to it; equal ones if all parts are 0."""
    weights = [max(0, part) for part in parts]
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    shares, given, upto = [], 0, 0
    for weight in weights:
        upto += weight
        share = amount * upto // whole - given
        shares.append(share)
        given += share
    return shares
