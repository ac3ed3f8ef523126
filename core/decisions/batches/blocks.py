"""Decides which blocks of KV memory hold which tokens: pure bookkeeping.

A block has room for the keys and values of ``block_tokens`` tokens in all layers. Sequences share blocks with equal
prefixes (prefix reuse); an unused block keeps its contents until its room is needed.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

ROOT: Final = b""
"""The key of the empty prefix, before the first block."""


def key_of(before: bytes, tokens: Sequence[int]) -> bytes:
    """Names a full block by all tokens up to its end. No client can choose tokens that collide."""
    digest = hashlib.blake2b(before, digest_size=16)
    digest.update(b"".join(token.to_bytes(4, "little") for token in tokens))
    return digest.digest()


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in the order of its tokens. ``keys`` name those that are full and whose contents
    others may use.
    """

    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)


class Blocks:
    """The blocks of one runtime, by number. Memory is taken and given back in extents of blocks."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._free: list[int] = []
        self._used: dict[int, int] = {}  # how many tables have it
        self._by_key: dict[bytes, int] = {}  # full blocks that may be shared
        self._keys: dict[int, bytes] = {}  # the same the other way round
        self._idle: OrderedDict[int, None] = OrderedDict()  # in no table, with contents; least recently used first
        self._extents: dict[int, range] = {}
        self._homes: dict[int, int] = {}  # extent by block
        self._taken: dict[int, int] = {}  # by extent: how many of its blocks are in tables
        self._spare: dict[int, None] = {}  # extents of which none is
        self._number = 0

    # --- memory

    @property
    def count(self) -> int:
        return sum(len(numbers) for numbers in self._extents.values())

    @property
    def available(self) -> int:
        """Number of blocks that can be had without more memory."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Number of unused blocks that are kept for possible reuse."""
        return len(self._idle)

    @property
    def spare(self) -> int:
        """Number of blocks in extents that could be given back."""
        return sum(len(self._extents[extent]) for extent in self._spare)

    def grow(self, extent: int, blocks: int) -> range:
        """An extent's memory is here. Returns the numbers of its blocks."""
        numbers = range(self._number, self._number + blocks)
        self._number += blocks
        self._extents[extent] = numbers
        self._homes.update(dict.fromkeys(numbers, extent))
        self._taken[extent], self._spare[extent] = 0, None
        self._free.extend(reversed(numbers))
        return numbers

    def returnable(self, count: int, keep_idle: bool = False) -> list[int]:
        """Up to ``count`` extents that can be given back, those without contents first. They are not given back yet."""
        idle = self._idle
        found = [(sum(number in idle for number in self._extents[extent]), extent) for extent in self._spare]
        return [extent for contents, extent in sorted(found)[:count] if not (keep_idle and contents)]

    def shrink(self, extent: int) -> None:
        """One of :meth:`returnable` is given back."""
        gone = self._extents.pop(extent)
        del self._taken[extent], self._spare[extent]
        for number in gone:
            del self._homes[number]
            if number in self._idle:
                self._forget(number)
        numbers = set(gone)
        self._free = [number for number in self._free if number not in numbers]

    # --- sequences

    def share(self, tokens: Sequence[int], salt: bytes = ROOT) -> BlockTable:
        """Returns a table with the blocks that hold a prefix of these tokens already. At least the last token remains
        to be computed. ``salt`` separates sequences that have equal tokens but must not share.
        """
        table, before = BlockTable(), salt
        size = self.block_tokens
        for start in range(0, (len(tokens) - 1) // size * size, size):
            before = key_of(before, tokens[start : start + size])
            number = self._by_key.get(before)
            if number is None:
                break
            self._idle.pop(number, None)
            self._use(number)
            table.blocks.append(number)
            table.keys.append(before)
        return table

    def extend(self, table: BlockTable, tokens: int) -> bool:
        """Makes room for ``tokens`` tokens in all; returns False, with nothing changed, if there is not enough."""
        wanted = -(-tokens // self.block_tokens) - len(table.blocks)
        if wanted > self.available:
            return False
        for _ in range(wanted):
            table.blocks.append(self._take())
        return True

    def filled(self, table: BlockTable, tokens: Sequence[int], computed: int, salt: bytes = ROOT) -> None:
        """The first ``computed`` of these tokens are computed: their full blocks may be shared from now on."""
        size = self.block_tokens
        for index in range(len(table.keys), computed // size):
            before = table.keys[-1] if table.keys else salt
            key = key_of(before, tokens[index * size : (index + 1) * size])
            table.keys.append(key)
            number = table.blocks[index]
            if key not in self._by_key:
                self._by_key[key], self._keys[number] = number, key

    def release(self, table: BlockTable) -> None:
        """The sequence has ended or is preempted. Its last blocks are evicted first."""
        for number in reversed(table.blocks):
            self._used[number] -= 1
            if self._used[number]:
                continue
            del self._used[number]
            home = self._homes[number]
            self._taken[home] -= 1
            if not self._taken[home]:
                self._spare[home] = None
            if number in self._keys:
                self._idle[number] = None
            else:
                self._free.append(number)
        table.blocks, table.keys = [], []

    def _take(self) -> int:
        if self._free:
            number = self._free.pop()
        else:
            number = next(iter(self._idle))
            self._forget(number)
        self._use(number)
        return number

    def _use(self, number: int) -> None:
        used = self._used[number] = self._used.get(number, 0) + 1
        if used == 1:
            home = self._homes[number]
            self._taken[home] += 1
            self._spare.pop(home, None)

    def _forget(self, number: int) -> None:
        del self._idle[number]
        del self._by_key[self._keys.pop(number)]

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Asserts that the tables here agree with each other and with all sequences' tables."""
        used: dict[int, int] = {}
        for table in tables:
            for number in table.blocks:
                used[number] = used.get(number, 0) + 1
        assert used == self._used
        everything = [number for numbers in self._extents.values() for number in numbers]
        assert sorted([*self._free, *self._idle, *self._used]) == sorted(everything)
        assert {key: number for number, key in self._keys.items()} == self._by_key
        assert set(self._idle) <= set(self._keys)
        taken = {extent: sum(number in used for number in numbers) for extent, numbers in self._extents.items()}
        assert taken == self._taken
        assert set(self._spare) == {extent for extent, count in taken.items() if not count}
