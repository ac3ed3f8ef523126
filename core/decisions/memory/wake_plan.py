"""Changes of a wake on a GPU, or the reason why it is impossible, and the state of one instance in the books there
(residency.py): its model and its seat. Values only.
"""

from dataclasses import dataclass, field

from dormouse.core.decisions.memory.models import ModelLayout
from dormouse.core.decisions.memory.pools.protocol import PoolChange
from dormouse.core.quantities import size, sizes


class ModelTooLarge(Exception):
    """The model cannot fit into this GPU. The text has the numbers; ``plan`` has the changes of the pool, which
    remain.
    """

    def __init__(self, text: str, plan: PoolChange) -> None:
        super().__init__(text)
        self.plan = plan


def refuse_too_large(model: ModelLayout, capacity: int, reserve_nbytes: int) -> None:
    """Raises ModelTooLarge if it is larger than the GPU's memory beside the reserve."""
    needed = model.needs_nbytes
    if needed > capacity - reserve_nbytes:
        needs, has = sizes(needed, capacity)
        raise ModelTooLarge(
            f"the model needs {needs} of GPU memory; this GPU has {has}"
            + (f", of which {size(reserve_nbytes)} are in use for activations" if reserve_nbytes else "")
            + ": use a smaller model or data type, or raise gpu.memory in the node's configuration",
            PoolChange(),
        )


@dataclass
class WakePlan:
    """Changes of a wake in the books, to be carried out in order: first the plans of the pool."""

    plans: list[PoolChange] = field(default_factory=list)
    missing: list[tuple[int, int, int]] = field(default_factory=list)  # (segment, offset, nbytes), first use first

    @property
    def copy_nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.missing)


class SeatedModel:
    """The segments that one instance keeps here: those of its model. Segments that it writes in place have other
    numbers.
    """

    __slots__ = ("claimed", "model")

    def __init__(self, model: ModelLayout) -> None:
        self.model = model
        self.claimed: dict[int, int] = {}  # segment by the number that its bytes have now

    @property
    def held(self) -> set[int]:
        """Segments that stay where they are while it has its seat."""
        return (self.model.nbytes.keys() - self.claimed.values()) | self.claimed.keys()

    def holds(self, segment: int) -> bool:
        return segment in self.claimed or (segment in self.model.nbytes and segment not in self.claimed.values())
