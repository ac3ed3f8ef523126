"""Notification of a change, for tasks in the loop that wait for it."""

import asyncio
from contextlib import suppress


class Notifier:
    """Wakes all who wait when it is set; it remembers nothing."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def set(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next :meth:`set`, or after ``timeout_s``."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._next.wait(), timeout_s)
