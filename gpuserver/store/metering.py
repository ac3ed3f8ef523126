"""Host memory of each function, over time: pure. Equal bytes are counted once, for the set of functions that hold them;
bytes that no function holds are nobody's.
"""

from collections.abc import Callable
from typing import Final

from dormouse.core.decisions.memory.holdings import Holdings, OwnerGroup
from dormouse.gpuserver.store.memory.segments import Holder, Segments
from dormouse.schemas import messages as m

HOST: Final = "host"


class HostMeter:
    """``owner`` returns the function of a holder; "" if it is of none."""

    def __init__(self, segments: Segments, owner: Callable[[Holder], str]) -> None:
        self._segments, self._owner = segments, owner
        self._held = Holdings()

    def sync(self, now_s: float) -> None:
        """Take over changes, as of now."""
        touched = self._segments.touched
        for span, known in touched.items():
            holders = self._segments.holders_at(span, known)
            owners = {self._owner(holder) for holder in holders or ()}
            nbytes = 0 if holders is None else known.nbytes
            self._held.put(span, OwnerGroup.of(HOST, owners - {""}), nbytes, int(now_s * 1000))
        touched.clear()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to state, and will be nothing."""
        return self._held.empty

    def state(self, now_s: float) -> list[m.HostMetered]:
        self.sync(now_s)
        held = [
            m.HeldBytes(kind=group.kind, owners=list(group.owners), nbyte_ms=nbyte_ms)
            for group, nbyte_ms in self._held.take(int(now_s * 1000))
        ]
        return [m.HostMetered(held=held[start : start + m.ENTRIES]) for start in range(0, len(held), m.ENTRIES)]
