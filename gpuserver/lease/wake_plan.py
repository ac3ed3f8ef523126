"""What a wake changes on a GPU, or why it cannot, and what the books there (residency.py) know of one instance: its
model and its seat. Values only.
"""

from dataclasses import dataclass, field

from dormouse.core.freelist import aligned
from dormouse.gpuserver.pools.protocol import PoolChange


class ModelTooLarge(Exception):
    """The model cannot fit into what this GPU has; the text has the numbers, ``plan`` what has changed nevertheless."""

    def __init__(self, text: str, plan: PoolChange) -> None:
        super().__init__(text)
        self.plan = plan


@dataclass
class WakePlan:
    """What a wake changed in the books, to be carried out in order: first the plans of the pool."""

    plans: list[PoolChange] = field(default_factory=list)
    missing: list[tuple[int, int, int]] = field(default_factory=list)  # (segment, offset, nbytes), first use first

    @property
    def copy_nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.missing)


class ModelLayout:
    """An instance's newest manifest, as far as memory is concerned."""

    __slots__ = ("nbytes", "needs", "needs_nbytes")

    def __init__(self, needs: list[tuple[int, int]]) -> None:
        self.needs = needs  # (segment, nbytes), first use first
        self.nbytes = dict(needs)  # by segment
        self.needs_nbytes = sum(aligned(nbytes) for _, nbytes in needs)


class SeatedModel:
    """What one instance keeps here: its model, but for what it writes in place, which has other numbers."""

    __slots__ = ("claimed", "model")

    def __init__(self, model: ModelLayout) -> None:
        self.model = model
        self.claimed: dict[int, int] = {}  # segment by the number that its bytes have now

    def holds(self, segment: int) -> bool:
        return segment in self.claimed or (segment in self.model.nbytes and segment not in self.claimed.values())
