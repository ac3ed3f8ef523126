"""A runtime's memory for KV: extents of the pool, asked for when blocks are short and given back when nobody has them.

Before an extent goes back it is unmapped: the next moment it may be anybody's.
"""

import time
from typing import Final

from dormouse.core.decisions.batches.recompute import RecomputeCost
from dormouse.gpuserver.runtime.engine import Engine
from dormouse.gpuserver.runtime.executor_link import ExecutorLink
from dormouse.gpuserver.runtime.mapping import PoolMapping
from dormouse.schemas import messages as m

EXTENT_NBYTES: Final = 2 << 20
"""About the size of an extent: the small granule."""

EXTENTS: Final = 4
"""Wished for at once, at least: a question takes as long as a token of a small model."""


class KvExtents:
    """See the module. ``engine`` cuts them into blocks; there is none before the model is known."""

    def __init__(self, link: ExecutorLink, mapping: PoolMapping) -> None:
        self._link, self._mapping = link, mapping
        self.engine: Engine | None = None
        self._places: dict[int, tuple[int, int]] = {}  # where each is mapped
        self.cost = RecomputeCost()
        self.waited_s = 0.0  # for room, in all
        link.reclaim = self.reclaim

    def grow(self, blocks: int) -> bool:
        """Ask for room for so many blocks: whether it has come."""
        assert self.engine is not None
        block_nbytes = self.engine.layout.block_nbytes
        per_extent = max(1, EXTENT_NBYTES // block_nbytes)
        wanted = -(-blocks // per_extent)
        wish = max(0, EXTENTS - wanted)
        began_s = time.perf_counter()
        self._link.say(m.KvWanted(extents=wanted, nbytes=per_extent * block_nbytes, wish=wish))
        given = self._link.wait_for_memory().extents
        self.waited_s += time.perf_counter() - began_s
        for number, offset in given:
            self._places[number] = offset, per_extent * block_nbytes
            self.engine.add_extent(number, offset, per_extent * block_nbytes)
        return bool(given)

    def give_back(self) -> None:
        """Give back empty extents, when there is nothing to do."""
        assert self.engine is not None
        extents = self.engine.blocks.returnable(1 << 30, keep_idle=True)
        for extent in extents:
            self.engine.drop_extent(extent)
        self.send_back(extents)

    def send_back(self, extents: list[int], asked: bool = False) -> None:
        """Unmapped first. No block of them is the engine's any more."""
        for extent in extents:
            self._places.pop(extent, None)
        if extents:
            self._mapping.keep_written(list(self._places.values()))
        if extents or asked:
            self._link.say(m.KvReturned(extents=extents, idle=self.idle))

    @property
    def idle(self) -> m.IdleKv:
        """The memory that could be given back."""
        if self.engine is None:
            return m.IdleKv(nbytes=0, recompute_us=0)
        blocks, layout = self.engine.blocks, self.engine.layout
        spare = blocks.spare
        contents = min(spare, blocks.idle) * blocks.block_tokens
        return m.IdleKv(nbytes=spare * layout.block_nbytes, recompute_us=self.cost.expected_us(contents))

    def reclaim(self, nbytes: int) -> None:
        """Others need so much: the extents that hold least go first. May be called wherever this waits for its
        executor: blocks that a step computes with are in tables.
        """
        extents: list[int] = []
        if self.engine is not None:
            per_extent = max(1, EXTENT_NBYTES // self.engine.layout.block_nbytes) * self.engine.layout.block_nbytes
            extents = self.engine.blocks.returnable(-(-nbytes // per_extent))
            for extent in extents:
                self.engine.drop_extent(extent)
        self.send_back(extents, asked=True)

    def clear(self) -> None:
        """The seat ends: all of them are gone, and nothing is mapped."""
        if self.engine is not None:
            for extent in self.engine.blocks.returnable(1 << 30):
                self.engine.drop_extent(extent)
        self._mapping.clear()
        self._places.clear()
