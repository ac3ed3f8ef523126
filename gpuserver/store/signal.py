"""Something that has changed, for whoever waits for it in the loop."""

import asyncio


class Notifier:
    """Wakes all who wait when it is set; it remembers nothing."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def set(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Return at the next :meth:`set`, or after ``timeout_s``."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        await asyncio.wait([waiter], timeout=timeout_s)
        self._waiters.discard(waiter)
