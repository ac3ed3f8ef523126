"""Decides how the segments of a wake are packed into blocks, as PyTorch's caching allocator would."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dormouse.core.decisions.memory.freelist import aligned
from dormouse.core.decisions.memory.pools.partitions import NOWHERE, SlotRange


@dataclass(slots=True)
class Block:
    """Segments packed together, and the slots that they have been given."""

    slots: int  # as asked for
    members: list[tuple[int, int]] = field(default_factory=list)  # (segment, offset in the block)
    filled: int = 0
    place: SlotRange = NOWHERE


def blocks_of(needs: Sequence[tuple[int, int]], slot_nbytes: int) -> list[Block]:
    """The blocks that PyTorch's caching allocator would make for these ``(segment, nbytes)`` in their order: segments
    of at most half a slot together in one slot, those below 5 slots in ten, larger ones in a block each.
    """
    blocks: list[Block] = []
    small: Block | None = None
    large: Block | None = None
    for segment, nbytes in needs:
        size = aligned(nbytes)
        if size <= slot_nbytes // 2:
            if small is None or small.filled + size > slot_nbytes:
                blocks.append(small := Block(1))
            block = small
        elif size < 5 * slot_nbytes:
            if large is None or large.filled + size > 10 * slot_nbytes:
                blocks.append(large := Block(10))
            block = large
        else:
            blocks.append(block := Block(-(-size // slot_nbytes)))
        block.members.append((segment, block.filled))
        block.filled += size
    return blocks
