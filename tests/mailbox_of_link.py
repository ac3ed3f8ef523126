"""What a link has said to a test, to be waited for."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")
WAIT_S: Final = 90.0


class Mailbox:
    """What a link has said, to be waited for by kind."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self._arrived = asyncio.Event()

    def put(self, message: Any) -> None:
        self.messages.append(message)
        self._arrived.set()

    async def take(self, wanted: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(WAIT_S):
            while True:
                for index, message in enumerate(self.messages):
                    if wanted(message):
                        return self.messages.pop(index)
                self._arrived.clear()
                await self._arrived.wait()

    async def last(self, kind: type, wanted: Callable[[Any], bool]) -> None:
        """Wait until the newest message of a kind, if there is any, is this one."""
        async with asyncio.timeout(WAIT_S):
            while not all(wanted(said) for said in [said for said in self.messages if isinstance(said, kind)][-1:]):
                self._arrived.clear()
                await self._arrived.wait()

    async def of(self, *kinds: type[T]) -> T:
        taken: T = await self.take(lambda message: isinstance(message, kinds))
        return taken
