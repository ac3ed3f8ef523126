"""Interface of every strategy for a GPU's memory: one protocol, so that residency and benchmarks work with any.

A pool is books only: no byte moves here, and nothing depends on torch, instances or a device. Given the segments that a
wake needs and the cost of bringing each resident one back, it returns a :class:`PoolChange` that a device can carry
out. Offsets are in the pool's address space: memory itself for a contiguous pool, virtual addresses relative to the
reservation for one of pages.
"""

from collections.abc import Callable, Collection, Container, Iterable, KeysView, Sequence
from typing import NamedTuple, Protocol

import msgspec

from dormouse.schemas.errors import DormouseError


class PoolFull(DormouseError):
    """The segments cannot fit, whatever is evicted and moved; the text has the numbers. Nothing has changed."""


class Span(NamedTuple):
    """Bytes ``[offset, +nbytes)`` of the address space."""

    offset: int
    nbytes: int


class Move(NamedTuple):
    """Bytes that change their address inside a contiguous pool. The two spans may overlap, as in memmove."""

    segment: int
    source: int
    target: int
    nbytes: int


class Mapping(NamedTuple):
    """One physical granule at one address. ``clear``: its bytes were another tenant's and must be zeroed first."""

    offset: int
    granule: int
    nbytes: int
    clear: bool = False


class Granule(NamedTuple):
    """``nbytes`` of the device's exported memory from ``physical`` on, at this offset of the address space."""

    offset: int
    physical: int
    nbytes: int


class PoolChange(msgspec.Struct):
    """Changes in the books, by evicting and by dropping; to be carried out in the order of the fields."""

    evicted: list[int] = []  # segments that are not there any more
    freed: list[Span] = []  # given up by contiguous pools, to be poisoned
    unmapped: list[Mapping] = []  # by pools of pages
    moves: list[Move] = []  # safe one after the other in this order
    mapped: list[Mapping] = []
    placed: dict[int, int] = {}  # offset of each segment that has a place now, in wish order

    @property
    def moved_nbytes(self) -> int:
        return sum(move.nbytes for move in self.moves)


Cost = Callable[[int], float]
"""Cost of evicting a resident segment, in expected seconds (Tangram §3.2.2, Eq. 2: miss probability times bytes over
bandwidth times sensitivity)."""


class EvictionCost(Protocol):
    """The same, and the resulting order of eviction: pools that ignore addresses need not look at all segments."""

    def __call__(self, segment: int, /) -> float: ...

    def ascending(self, resident: Collection[int]) -> Iterable[int]:
        """``resident`` segments, the cheapest per byte first."""


class Pool(Protocol):
    """The books of one GPU's memory of ``capacity`` bytes.

    Every count is in bytes and exact. ``used_nbytes`` are the bytes of segments, with the rounding to the alignment;
    ``lost_nbytes`` those held beside them by granules or blocks; ``free_nbytes`` the rest of ``capacity``;
    ``largest_nbytes`` the largest segment that would fit with no eviction and no move.
    """

    capacity: int

    @property
    def used_nbytes(self) -> int: ...

    @property
    def lost_nbytes(self) -> int: ...

    @property
    def free_nbytes(self) -> int: ...

    @property
    def largest_nbytes(self) -> int: ...

    def place(
        self,
        needs: Sequence[tuple[int, int]],
        *,
        cost: EvictionCost,
        fixed: Container[int] = (),
        reserve_nbytes: int = 0,
        tenant: str = "",
        roaming: Container[int] = (),
    ) -> PoolChange:
        """Give room to all of ``needs``, ``(segment, nbytes)`` that are not resident, side by side where possible in
        that order.

        Evicts the cheapest segments while room is short, and moves others if the strategy does. Segments in ``fixed``
        are neither evicted nor moved.

        Args:
            reserve_nbytes: ``free_nbytes`` is at least this afterwards (activations outside the pool).
            tenant: owner of the needs, for clearing.
            roaming: those of the needs that need not keep their address: their users are sent it whenever they come.

        Raises:
            PoolFull: even with all others evicted there is no room.
        """

    def adopt(self, segment: int, nbytes: int, *, reserve_nbytes: int = 0, tenant: str = "") -> PoolChange | None:
        """Room for a segment without evicting or moving anything, or None."""

    def drop(self, segments: Iterable[int]) -> PoolChange:
        """Forget these segments; those that are not resident are passed over."""

    def forget(self, segments: Iterable[int]) -> None:
        """The addresses that are kept for these segments may be used again, because no manifest has them any more, or
        because they leave too little room; resident ones keep theirs.
        """

    def rename(self, old: int, new: int) -> None:
        """A resident segment's bytes are another segment's now, in the same place."""

    def __contains__(self, segment: object) -> bool:
        """Whether it is resident (or on its way: the pool does not know)."""

    def offset(self, segment: int) -> int:
        """Address of a resident segment. Raises KeyError."""

    def nbytes(self, segment: int) -> int:
        """Its size as asked for. Raises KeyError."""

    def segments(self) -> KeysView[int]:
        """All resident ones."""

    def owner(self, segment: int) -> str | None:
        """The tenant whose memory a resident segment lies in, not cleared for that tenant; None where memory has no
        tenant.
        """

    def extents(self, segment: int) -> list[Span]:
        """Pieces of the exported memory that hold its bytes, in order. Raises KeyError."""

    def granules(self, segments: Iterable[int]) -> list[Granule]:
        """The pieces of the exported memory that these resident segments lie in, each once: another process has to map
        them at the same offsets. Raises KeyError.
        """

    def check(self) -> None:
        """Assert every invariant: no overlap, nothing lost, counts exact."""
