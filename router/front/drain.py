"""Draining of the node: refuses new requests, and holds its callers until the earlier ones have ended.

A marker in the run directory keeps the state: a router that is started again goes on as the one before.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dormouse.router.access.access import Refusal

AGAIN_S: Final = 5
"""Seconds that clients are asked to wait: nobody knows how long it is."""

_REFUSAL: Final = Refusal(
    503,
    "draining",
    "this node is drained: it takes no new requests; send it to another node, or again later "
    "(`dormouse drain --undo` ends it)",
    ((b"retry-after", b"%d" % AGAIN_S),),
)


class Draining:
    """``left()``: how many requests and jobs are to end yet."""

    def __init__(self, marker: Path, left: Callable[[], int]) -> None:
        self._marker = marker
        self._left = left
        self._waiting: set[asyncio.Future[bool]] = set()
        self.on = marker.exists()

    def refusal(self) -> Refusal | None:
        """Why one more request may not be."""
        return _REFUSAL if self.on else None

    def begin(self) -> None:
        self._marker.touch()
        self.on = True

    def undo(self) -> None:
        self._marker.unlink(missing_ok=True)
        self.on = False
        self._tell(False)

    def look(self) -> None:
        """Something has ended."""
        if self.on and self._waiting and not self._left():
            self._tell(True)

    async def ended(self) -> bool:
        """True once nothing runs any more; False if it was undone before."""
        if not self.on or not self._left():
            return self.on
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            return await future
        finally:
            self._waiting.discard(future)

    def _tell(self, drained: bool) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(drained)
