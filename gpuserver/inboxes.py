"""Connections to executors' inboxes, where descriptors come. A message that is not taken at once waits, and blocks
nobody.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from dormouse.core.poster import Poster
from dormouse.schemas.errors import PeerLost
from dormouse.schemas.messages import InboxPacket

TRIES: Final = 200
RETRY_S: Final = 0.05
"""An executor binds its inbox before it sends Ready, so the first try succeeds unless it has died: 10 s, then it is
given up.
"""

InboxPoster = Poster[InboxPacket, InboxPacket]


async def reach(path: str, wanted: Callable[[], bool]) -> InboxPoster | None:
    """A way into this inbox; None if it is wanted no more, or is never there."""
    for _ in range(TRIES):
        if not wanted():
            break
        try:
            return Poster(path, InboxPacket, lambda message: None, lambda: None)
        except PeerLost:
            await asyncio.sleep(RETRY_S)
    return None
